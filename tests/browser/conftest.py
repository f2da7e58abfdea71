"""Headless Chromium through Playwright, and the pages under test. Run with `make test-browser`."""

import os
import shutil

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium: `make test-browser` installs it, or CHROMIUM names one")
    with playwright.sync_playwright() as manager:
        opened = manager.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        yield opened
        opened.close()


class Tab:
    """A page that is open, with everything that it complained about."""

    def __init__(self, browser, path, *, width=1280, height=800, scheme="light", touch=False):
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=touch, offline=True
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda r: self.complaints.append(r.url) if r.url.startswith("http") else None)
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def draw_all(self) -> None:
        """Scroll through the page, so that every chart is drawn."""
        for chart in self.page.query_selector_all(".chart"):
            chart.scroll_into_view_if_needed()
            self.page.wait_for_function("element => element.querySelector('.main-svg')", arg=chart)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.fixture
def open_tab(browser):
    tabs = []

    def open_(path, **options) -> Tab:
        tabs.append(Tab(browser, path, **options))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.context.close()
        assert not tab.complaints
