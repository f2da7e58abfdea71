"""The report in a real browser: every chart, hover, selection, themes, phone width, no network."""

import json

import pytest

from lssar.report.collect import collect
from lssar.report.report import report_html

pytestmark = pytest.mark.browser


def curve(run: str, losses: list[float]) -> dict:
    points = [
        {"length": 128 * 4**i, "context": 128 * 4**i, "tokens": 128, "loss": x, "low": x - 0.1, "high": x + 0.1}
        for i, x in enumerate(losses)
    ]
    steps = [{"step": i, "loss": 5 / (1 + i), "grad_norm": 1.0} for i in range(1, 60)]
    return {
        "run": run, "label": run, "attention": run, "step": 3, "train_length": 128, "ntk": "off", "window": None,
        "recipe": {"attention": run, "length": 128}, "by_length": points, "last": points,
        "by_position": [{"start": 16 * i, "stop": 16 * i + 16, "loss": 2.0} for i in range(8)],
        "training": {"curve": steps, "tokens": 6e6, "val_loss": 1.5},
    }  # fmt: skip


def rate(share: float) -> dict:
    return {"right": round(4 * share), "of": 4, "rate": share, "low": share / 2, "high": min(1, share + 0.2)}


def arm(run: str, far: float) -> dict:
    rows = []
    for multiple, share in ((1, 1.0), (16, far)):
        cells = [{"depth": depth, "greedy": rate(share)} for depth in (0.0, 0.5, 1.0)]
        rows.append({"task": "passkey", "length": 128 * multiple, "greedy": rate(share), "cells": cells})
    return {"run": run, "label": run, "attention": run, "ntk": "off", "window": None, "train_length": 128, "rows": rows}


def diagnosis(run: str) -> dict:
    grids = [[[length + layer + head for head in range(2)] for layer in range(3)] for length in range(2)]
    statistics = dict.fromkeys(("entropy", "effective", "above_mean", "first_token"), grids)
    return {"run": run, "attention": run, "lengths": [128, 2048], "rows": 4, "statistics": statistics}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    files = {
        "length": {"curves": [curve("softmax", [1.1, 1.5, 2.5]), curve("lssar", [1.1, 1.0, 1.0])]},
        "retrieval": {"arms": [arm("softmax", 0.0), arm("lssar", 1.0)]},
        "softmax": diagnosis("softmax"),
        "lssar": diagnosis("lssar"),
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "report.html").write_text(report_html(collect([folder / f"{name}.json" for name in files])))
    return folder / "report.html"


def test_every_chart_is_drawn_without_complaints(page, open_tab):
    tab = open_tab(page)
    tab.draw_all()
    figures = tab.page.query_selector_all("figure.card")
    described = tab.page.evaluate("JSON.parse(document.getElementById('charts').textContent).length")
    assert len(figures) == described
    titles = [figure.query_selector("figcaption").inner_text() for figure in figures]
    for wanted in ("Loss while training", "Loss by length", "passkey · lssar", "Entropy, nats · softmax"):
        assert wanted in titles
    assert all(figure.query_selector(".main-svg") for figure in figures)


def test_hover_shows_the_numbers(page, open_tab):
    tab = open_tab(page)
    chart = tab.page.query_selector("#length .chart")
    chart.scroll_into_view_if_needed()
    tab.page.wait_for_function("element => element.querySelector('.point')", arg=chart)
    # The last point of the first curve with points: bands have none.
    box = chart.query_selector_all(".point")[2].bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.page.wait_for_function("element => element.querySelector('.hoverlayer .hovertext')", arg=chart)
    assert "2.500" in chart.query_selector(".hoverlayer").text_content()


def test_length_of_the_diagnostics_is_chosen(page, open_tab):
    tab = open_tab(page)
    tab.draw_all()
    charts = "[...document.querySelectorAll('#diagnostics .chart')]"
    shown = f"() => {charts}.map(chart => chart.data.findIndex(trace => trace.visible === true))"
    assert set(tab.page.evaluate(shown)) == {0}
    tab.page.select_option("select[data-group=diagnostics]", index=1)
    tab.page.wait_for_function(f"() => ({shown})().every(i => i === 1)")


def test_themes(page, open_tab):
    tab = open_tab(page, scheme="dark")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.draw_all()
    colour = "() => getComputedStyle(document.querySelector('.chart .xtitle')).fill"
    dark = tab.page.evaluate(colour)
    tab.page.click("#theme")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "light"
    tab.page.wait_for_function(f"before => ({colour})() !== before", arg=dark)
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_wider_than_the_screen(page, open_tab, width):
    tab = open_tab(page, width=width, touch=width < 800)
    tab.draw_all()
    assert tab.overflow() <= 0
    narrow = tab.page.evaluate("Math.min(...[...document.querySelectorAll('.chart')].map(c => c.clientWidth))")
    assert narrow >= 280
