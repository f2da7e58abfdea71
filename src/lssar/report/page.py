"""A self-contained HTML page: styles, scripts, data and the charting library in one file.

Large parts (Plotly's JavaScript, attention weights) are embedded as gzip in base64 and unpacked by the browser, which
makes a page about 2 MB instead of 5 MB. Charts are described in Python with Plotly and drawn when they come
into view.
"""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lssar.records import write_file


def plotly() -> Any:
    """The module `plotly`, or an ImportError that says how to install it."""
    try:
        import plotly
    except ImportError as error:
        raise ImportError("report pages need Plotly: pip install 'lssar[report]'") from error
    return plotly


def asset(name: str) -> str:
    return (resources.files("lssar.report") / "assets" / name).read_text(encoding="utf-8")


def packed(data: bytes) -> str:
    """gzip in base64, as `unpack` of page.js reads it."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


@functools.cache
def _library() -> str:
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs().encode())


def text(value: Any) -> str:
    return html.escape(str(value))


def embedded_json(identity: str, value: Any) -> str:
    """A JSON data block; `<` is escaped, so that no text in it can end the block."""
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{text(identity)}">{body}</script>'


def embedded_bytes(identity: str, data: bytes) -> str:
    return f'<script type="text/plain" id="{text(identity)}">{packed(data)}</script>'


@dataclass
class Chart:
    """One Plotly figure in a card. Figures that share a `group` follow the select box of that group."""

    title: str
    figure: Any
    """plotly.graph_objects.Figure"""
    note: str = ""
    group: str = ""
    height: int = 300
    wide: bool = False
    """Takes the whole width of the page."""
    starts_row: bool = False

    def to_dict(self) -> dict[str, Any]:
        described = json.loads(self.figure.to_json())
        return {"data": described["data"], "layout": described["layout"], "group": self.group}


@dataclass
class Section:
    identity: str
    title: str
    lead: str = ""
    """HTML."""
    charts: list[Chart] = field(default_factory=list)
    body: str = ""
    """HTML after the charts."""


def section_html(section: Section, first_chart: int) -> str:
    cards = []
    for number, chart in enumerate(section.charts, first_chart):
        note = f'<p class="note">{text(chart.note)}</p>' if chart.note else ""
        cards.append(
            f'<figure class="card{" wide" * chart.wide}{" first" * chart.starts_row}">'
            f"<figcaption>{text(chart.title)}</figcaption>"
            f'<div class="chart" data-chart="{number}" style="height:{chart.height}px" role="img" '
            f'aria-label="{text(chart.title)}"></div>{note}</figure>'
        )
    grid = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    return (
        f'<section id="{text(section.identity)}"><h2>{text(section.title)}</h2>{section.lead}{grid}{section.body}'
        "</section>"
    )


def report_page(title: str, subtitle: str, sections: list[Section]) -> str:
    """The whole page of `sections` as HTML text."""
    charts: list[dict[str, Any]] = []
    parts: list[str] = []
    for section in sections:
        parts.append(section_html(section, len(charts)))
        charts += [chart.to_dict() for chart in section.charts]
    links = "".join(f'<a href="#{text(s.identity)}">{text(s.title)}</a>' for s in sections)
    body = f'<nav aria-label="Sections">{links}</nav><main>{"".join(parts)}</main>'
    return document(title, subtitle, body, embedded_json("charts", charts), scripts=("page.js", "report.js"))


def document(
    title: str, subtitle: str, body: str, data: str, scripts: tuple[str, ...], styles: tuple[str, ...] = ("page.css",)
) -> str:
    """A page with the library, these data blocks, scripts and styles of `assets`, and the theme button."""
    plotly()
    css = "\n".join(asset(name) for name in styles)
    code = "\n".join(asset(name) for name in scripts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="lssar">
<link rel="icon" href="data:,">
<title>{text(title)}</title>
<style>
{css}
</style>
</head>
<body>
<header>
<div><h1>{text(title)}</h1><p class="subtitle">{text(subtitle)}</p></div>
<button id="theme" type="button" aria-label="Switch between light and dark colours">◐</button>
</header>
<noscript><p class="warning">The charts of this page are drawn by JavaScript, which is switched off.</p></noscript>
<p id="problem" class="warning" hidden></p>
{body}
<script type="text/plain" id="library">{_library()}</script>
{data}
<script>
{code}
</script>
</body>
</html>
"""


def write_page(path: Path, page: str, overwrite: bool) -> Path:
    return write_file(path, lambda p: p.write_text(page, encoding="utf-8"), overwrite)
