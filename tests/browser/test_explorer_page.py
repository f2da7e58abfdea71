"""The attention explorer in a real browser: pointing, tapping, keyboard, selection, and a text of 4,096 tokens."""

import pytest
import torch

from lssar.data.tokenizers import load_tokenizer
from lssar.model import GPT
from lssar.report.explorer import Subject, write_explorer
from lssar.training.recipes import recipe

pytestmark = pytest.mark.browser
TEXT = "def add(first, second):\n    return first + second  # <b>not</b> markup & so on\n\n"
TOKENS = 4096
SPANS = "[...document.querySelectorAll(\"[data-pane='0'] .tokens span\")]"


def model(**changes) -> GPT:
    torch.manual_seed(0)
    made = GPT(recipe("tiny-cpu", size="0.8m", heads=2, **changes).model()).eval()
    for parameter in made.parameters():  # rows of a fresh model are nearly uniform
        parameter.data *= 3
    return made


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    tokenizer = load_tokenizer("bytes")
    subjects = [
        Subject("long reader", model(layout="softmax@32*3 lssa+lssar/none"), tokenizer),
        Subject("softmax", model(attention="softmax"), tokenizer),
    ]
    out = tmp_path_factory.mktemp("explorer") / "explore.html"
    return write_explorer(subjects, TEXT * 60, out, title="Attention", tokens=TOKENS)


def token(tab, index: int, pane: int = 0):
    return tab.page.locator(f"[data-pane='{pane}'] .tokens span[data-i='{index}']")


def shown(tab, pane: int = 0) -> str:
    return tab.page.inner_text(f"[data-pane='{pane}'] .facts")


def choose_head(tab, index: int) -> None:
    tab.page.locator("[data-pane='0'] select.head").select_option(index=index)
    tab.page.wait_for_selector(f"[data-pane='0'][data-head='rows-0-3-{index}']")


def test_pointing_shows_the_row_in_both_panes(page, open_tab):
    tab = open_tab(page)
    assert "No token" in shown(tab)
    choose_head(tab, 1)
    token(tab, 100).hover()
    tab.page.wait_for_selector("[data-pane='0'][data-token='100']")
    tab.page.wait_for_selector("[data-pane='1'][data-token='100']")
    facts = shown(tab)
    for words in ("101 keys", "survive it", "threshold", "the mean", "not shown", "effective keys"):
        assert words in facts
    assert "above the mean" in shown(tab, 1) and "survive" not in shown(tab, 1)
    marked = tab.page.evaluate(f"{SPANS}.filter(span => span.style.backgroundColor).map(span => +span.dataset.i)")
    assert marked and max(marked) <= 100
    tab.page.wait_for_selector("[data-pane='0'] .chart[data-token='100'] .point")
    token(tab, 50).hover()
    tab.page.wait_for_selector("[data-pane='0'][data-token='50']")
    assert "51 keys" in shown(tab)


def test_layer_and_head_change_what_is_shown(page, open_tab):
    tab = open_tab(page)
    token(tab, 200).click()
    before = shown(tab)
    assert "survive" not in before
    assert "lssar, p = 15" in tab.page.locator("[data-pane='0'] select.head option").all_inner_texts()[1]
    choose_head(tab, 1)
    assert "survive" in shown(tab)
    tab.page.locator("[data-pane='0'] select.layer").select_option(index=0)
    tab.page.wait_for_selector("[data-pane='0'][data-head='rows-0-0-0']")
    assert "32 keys" in shown(tab)


def test_a_tap_holds_and_a_second_one_releases(page, open_tab):
    tab = open_tab(page, width=390, height=844, touch=True)
    assert tab.overflow() <= 0
    token(tab, 60).tap()
    tab.page.wait_for_selector("[data-pane='0'][data-token='60']")
    assert "61 keys" in shown(tab)
    token(tab, 60).tap()
    tab.page.wait_for_function("document.querySelector('.facts').innerText.includes('No token')")


def test_keyboard(page, open_tab):
    tab = open_tab(page)
    tab.page.locator("[data-pane='0'] .tokens").focus()
    for key, at in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", TOKENS - 1), ("Home", 0)):
        tab.page.keyboard.press(key)
        tab.page.wait_for_selector(f"[data-pane='0'][data-token='{at}']")
    tab.page.keyboard.press("ArrowDown")
    tab.page.wait_for_function("+document.querySelector('[data-pane=\"0\"]').dataset.token > 5")
    assert "attends to" in tab.page.inner_text("#spoken")
    tab.page.keyboard.press("Escape")
    assert "No token" in shown(tab)


def test_text_is_text(page, open_tab):
    tab = open_tab(page)
    assert tab.page.locator(".tokens b").count() == 0
    text = tab.page.evaluate(f"{SPANS}.map(span => span.textContent).join('')")
    assert "<b>not</b> markup & so on" in text


def test_themes(page, open_tab):
    tab = open_tab(page, scheme="dark")
    token(tab, 30).click()
    tab.page.click("#theme")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "light"


def test_4096_tokens_stay_responsive(page, open_tab, record_property):
    """Pointing at 60 tokens all over the text: the time until each row is on the screen, printed and recorded."""
    tab = open_tab(page)
    times = tab.page.evaluate(
        """async () => {
          const box = document.querySelector("[data-pane='0'] .tokens"), times = [];
          const spans = box.querySelectorAll("span");
          for (let n = 0; n < 60; n++) {
            const i = (n * 997) % spans.length;
            const began = performance.now();
            spans[i].dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
            const pane = document.querySelector("[data-pane='0']");
            while (pane.dataset.token !== String(i)) await new Promise(requestAnimationFrame);
            await new Promise((r) => requestAnimationFrame(() => setTimeout(r, 0)));
            times.push(performance.now() - began);
          }
          return times.sort((a, b) => a - b);
        }"""
    )
    middle, late = times[len(times) // 2], times[int(0.95 * len(times))]
    record_property("milliseconds", {"median": middle, "95%": late})
    print(f"\n4,096 tokens, two panes: a row is on the screen after {middle:.0f} ms (median), {late:.0f} ms (95%)")
    assert len(times) == 60
