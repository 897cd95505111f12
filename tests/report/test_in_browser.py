"""The page in a real browser: it loads without errors, shows the numbers of the log, and its switches work by mouse and keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.reported import whole_run

from hookline.loggers import read_log
from hookline.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright) and Chromium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs an installed Chromium; Playwright's own download is not used"),
    pytest.mark.filterwarnings("ignore"),  # of the driver, not of ours
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page with everything it has complained about or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1366, "height": 850}, **options})
        self.trouble: list[str] = []
        self.page.on("console", lambda each: self.trouble.append(each.text))
        self.page.on("pageerror", lambda each: self.trouble.append(str(each)))
        self.page.on("dialog", lambda each: self.trouble.append(each.message))
        self.page.on("request", lambda each: self.trouble.append(each.url) if not each.url.startswith(("file:", "data:")) else None)
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("canvas")


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    made = Opened(browser, write_report([whole_run()])[0])
    yield made
    assert made.trouble == []
    made.page.close()


def wait_until(page: Any, expression: str) -> None:
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)  # not wait_for_function: the page's policy forbids what that does
    raise AssertionError(expression)


def scroll_through(page: Any) -> None:
    for place in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"scrollTo(0, {place})")
        page.wait_for_timeout(20)


def test_it_loads_without_errors_and_without_running_what_was_logged(opened: Opened) -> None:
    scroll_through(opened.page)
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("img").count() == 3  # the pictures that were logged, and none from a name
    wait_until(opened.page, "view.charts.every((chart) => chart.plot)")


def test_the_table_shows_the_numbers_of_the_log(opened: Opened) -> None:
    values = [each["metrics"]["val/loss"] for each in read_log("run/log.jsonl") if "val/loss" in each.get("metrics", {})]
    cells = opened.page.locator("#values tr", has=opened.page.get_by_role("rowheader", name="val/loss", exact=True)).locator("td")
    shown = [cells.nth(index).inner_text().split(" @")[0] for index in range(3)]
    assert [float(each) for each in shown] == pytest.approx([values[-1], min(values), max(values)], rel=1e-4)


def test_pointing_at_a_curve_reads_its_values(opened: Opened) -> None:
    first = next(each["metrics"]["train/loss"] for each in read_log("run/log.jsonl") if "train/loss" in each.get("metrics", {}))
    over = opened.page.locator(".chart .u-over").first.bounding_box()
    opened.page.mouse.move(over["x"] + 2, over["y"] + 30)
    assert opened.page.locator(".chart .at").first.inner_text().startswith("step 1")
    assert float(opened.page.locator(".chart .legend b").first.inner_text()) == pytest.approx(first, rel=1e-4)


def test_smoothing_and_log_scale_change_what_is_drawn(opened: Opened) -> None:
    page, drawn = opened.page, "view.charts[0].plot.data[2].join()"
    before = page.evaluate(drawn)
    page.get_by_label("Smoothing").fill("0.9")
    assert page.evaluate(drawn) != before
    page.get_by_label("Smoothing").fill("0")
    assert page.evaluate(drawn) == before
    page.get_by_role("button", name="log scale", exact=True).click()
    wait_until(page, "view.charts[0].plot && view.charts[0].plot.scales.y.distr === 3")
    page.get_by_role("button", name="val/loss").click()
    assert page.evaluate("view.charts[0].plot.series.map((each) => each.show).slice(-1)[0]") is False


def test_everything_can_be_reached_and_used_from_the_keyboard(opened: Opened) -> None:
    page, reached = opened.page, []
    while True:
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # past the last one
        reached.append(page.evaluate("(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).slice(0, 30)"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]
    assert reached[0] == "Skip to the report"
    for name in ("Colours: auto", "Smoothing", "log scale", "reset zoom", "Find a metric", "loss: train/loss", "train/loss"):
        assert any(each.startswith(name) for each in reached), name
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".chart .at").first.inner_text().startswith("step ")
    page.keyboard.press("+")
    assert page.evaluate("view.charts[0].plot.scales.x.max") < 12
    page.locator(".heat canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#gradients p.at").inner_text().startswith("layer, step 2: ")


def test_a_metric_can_be_found_by_name(opened: Opened) -> None:
    opened.page.get_by_label("Find a metric").fill("samples_per")
    assert opened.page.locator(".chart:visible h3").all_inner_texts() == ["samples per second"]


def test_the_colours_follow_the_system_and_the_switch(browser: Any) -> None:
    path = write_report([whole_run()])[0]
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {scheme: Opened(browser, path, color_scheme=scheme) for scheme in ("light", "dark")}
    light, dark = (each.page.evaluate(ground) for each in seen.values())
    assert light != dark
    seen["light"].page.get_by_role("button", name="Colours").click()
    assert seen["light"].page.evaluate(ground) == light
    seen["light"].page.get_by_role("button", name="Colours").click()
    assert seen["light"].page.evaluate(ground) == dark
    for each in seen.values():
        each.page.close()


def test_nothing_sticks_out_on_a_phone(browser: Any) -> None:
    whole_run("other", lr=0.01)
    made = Opened(browser, write_report([whole_run(), "other"])[0], viewport={"width": 360, "height": 740})
    scroll_through(made.page)
    assert made.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert made.trouble == []
    made.page.close()
