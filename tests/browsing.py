"""A real browser for tests of pages: Chromium as the system has it, driven by Playwright."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = (
    'needs Playwright: pip install "hookline[browser]"'
    if importlib.util.find_spec("playwright") is None
    else "needs an installed Chromium (Debian: apt-get install chromium); Playwright's own download is not used"
    if CHROMIUM is None
    else ""
)
REQUIRED = os.environ.get("HOOKLINE_BROWSER_REQUIRED") == "1"

in_browser = [
    pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=MISSING),
    pytest.mark.filterwarnings("ignore"),  # of the driver, not of ours
]
"""What a module of such tests is marked with. HOOKLINE_BROWSER_REQUIRED=1 makes a missing browser a failure."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    assert not MISSING, MISSING
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


DESKTOP = {"width": 1366, "height": 850}


class Opened:
    """A page with everything it has complained about, and every address it has asked for."""

    def __init__(self, browser: Any, address: str | None = None, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": DESKTOP, **options})
        self.page.set_default_timeout(120_000)  # on a busy machine, too
        self.trouble: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda each: self.trouble.append(each.text))
        self.page.on("pageerror", lambda each: self.trouble.append(str(each)))
        self.page.on("dialog", lambda each: self.trouble.append(each.message))
        self.page.on("request", lambda each: self.asked.append(each.url))
        if address is not None:
            self.load(address)

    def load(self, address: str) -> None:
        """Go to an address and wait until something is drawn."""
        self.page.goto(address)
        self.page.wait_for_selector("canvas")

    def show(self, address: str, width: int = 1366, height: int = 850, scheme: str = "light") -> None:
        """Show another document as if it was the first one, for half of what a new page costs. What a document stores stays."""
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=scheme)
        self.trouble.clear()
        self.asked.clear()
        self.load(address)

    @property
    def elsewhere(self) -> list[str]:
        """Addresses that are neither files nor inside the page."""
        return [each for each in self.asked if not each.startswith(("file:", "data:"))]


def wait_until(page: Any, expression: str) -> None:
    """Until a script's answer is true. Not wait_for_function: the page's own policy forbids what that does."""
    for _ in range(6000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(expression)


def scroll_through(page: Any) -> None:
    """Bring everything into view once: charts are drawn when they come into it."""
    for place in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"scrollTo(0, {place})")
        page.wait_for_timeout(20)
