"""The page in a real browser: it loads without errors, shows the numbers of the log, and its switches work by mouse and keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import Opened, in_browser, scroll_through, wait_until
from diverge.planted import AtStepEnd, nudge, samples
from diverge.planted import Net as Planted
from report.reported import MARKUP, metrics, traced, whole_run, written
from thorough import THOROUGH
from tiny import quiet

from hookline.loggers import read_log
from hookline.report import write_report

pytestmark = in_browser


def address(path: Path) -> str:
    return path.resolve().as_uri()


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Opened]:
    """A page that shows one document after the other."""
    made = Opened(browser)
    yield made
    made.page.close()


@pytest.fixture
def opened(window: Opened) -> Iterator[Opened]:
    window.show(address(write_report([whole_run()])[0]))
    yield window
    assert window.trouble == window.elsewhere == []


def test_it_loads_without_errors_and_without_running_what_was_logged(opened: Opened) -> None:
    scroll_through(opened.page)
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("img").count() == 3  # the pictures that were logged, and none from a name
    wait_until(opened.page, "view.charts.every((chart) => chart.plot)")


def test_the_table_shows_the_numbers_of_the_log(opened: Opened) -> None:
    values = [
        each["metrics"]["val/loss"]
        for each in read_log("run/log.jsonl")
        if "val/loss" in each.get("metrics", {})
    ]
    cells = opened.page.locator(
        "#values tr", has=opened.page.get_by_role("rowheader", name="val/loss", exact=True)
    ).locator("td")
    shown = [cells.nth(index).inner_text().split(" @")[0] for index in range(3)]
    assert [float(each) for each in shown] == pytest.approx([values[-1], min(values), max(values)], rel=1e-4)


def test_a_bar_shows_where_the_time_went(opened: Opened) -> None:
    logged = next(each for each in read_log("run/log.jsonl") if each["type"] == "timings")
    bar = opened.page.locator("#time svg.share")
    assert "waiting for data" in bar.get_attribute("aria-label")
    widths = [float(each.get_attribute("width")) for each in bar.locator("rect").all()]
    assert sum(widths) == pytest.approx(1000, rel=1e-3)
    row = opened.page.locator(
        "#time tr", has=opened.page.get_by_role("rowheader", name="waiting for data", exact=True)
    )
    share = float(row.locator("td").last.inner_text().split()[0]) / 100
    assert share == pytest.approx(logged["data"] / logged["total"], rel=0.01)


def test_pointing_at_a_curve_reads_its_values(opened: Opened) -> None:
    first = next(
        each["metrics"]["train/loss"]
        for each in read_log("run/log.jsonl")
        if "train/loss" in each.get("metrics", {})
    )
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
        reached.append(
            page.evaluate(
                "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).slice(0, 30)"
            )
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]
    assert reached[0] == "Skip to the report"
    for name in (
        "Colours: auto",
        "Smoothing",
        "log scale",
        "reset zoom",
        "Find a metric",
        "loss: train/loss",
        "train/loss",
    ):
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
    made = Opened(browser, address(path), color_scheme="dark")  # its own: it keeps what is chosen
    dark = made.page.evaluate(ground)
    made.show(address(path), scheme="light")
    light = made.page.evaluate(ground)
    assert light != dark
    made.page.get_by_role("button", name="Colours").click()
    assert made.page.evaluate(ground) == light
    made.page.get_by_role("button", name="Colours").click()
    assert made.page.evaluate(ground) == dark
    made.page.close()


def test_nothing_sticks_out_on_a_phone(window: Opened) -> None:
    whole_run("other", lr=0.01)
    window.show(address(write_report([whole_run(), "other"])[0]), 360, 740)
    scroll_through(window.page)
    assert window.page.evaluate("document.documentElement.scrollWidth") <= 360
    right = "[...document.querySelectorAll('#cost tbody tr:first-child td')].map((cell) => cell.getBoundingClientRect().right)"
    total, share = window.page.evaluate(right)[:2]
    assert total < share <= 360  # what a hook costs is seen without a swipe
    assert window.trouble == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (500, "light"), (360, "dark")])
def test_every_part_can_be_reached_from_the_navigation_without_a_swipe(
    window: Opened, width: int, scheme: str
) -> None:
    window.show(address(write_report([whole_run()])[0]), width, 740, scheme)
    links = window.page.locator("#tools nav a")
    boxes = [links.nth(index).bounding_box() for index in range(links.count())]
    assert len(boxes) >= 9 and all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert window.page.evaluate(
        "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('#tools nav'))"
    )
    button = window.page.get_by_role("button", name="Colours").bounding_box()
    for box in boxes:  # nothing lies over it
        assert box["x"] + box["width"] <= button["x"] or box["y"] >= button["y"] + button["height"]
    links.last.click()
    window.page.wait_for_timeout(100)
    title, tools = (
        window.page.locator("#configuration h2").bounding_box(),
        window.page.locator("#tools").bounding_box(),
    )
    assert title["y"] >= tools["y"] + tools["height"] or tools["y"] + tools["height"] <= 0


def test_the_card_says_how_far_a_run_is_and_numbers_can_be_read_and_have_all_their_digits_when_pointed_at(
    window: Opened,
) -> None:
    window.show(address(write_report([whole_run()])[0]))
    card = dict(
        zip(
            window.page.locator(".card dt").all_inner_texts(),
            window.page.locator(".card dd").all_inner_texts(),
            strict=True,
        )
    )
    assert (card["step"], card["epochs"]) == ("12", "3")
    assert "train/loss (epoch)" in card and "train/loss" not in card
    whole = [
        str(each["metrics"]["val/loss"])
        for each in read_log("run/log.jsonl")
        if "val/loss" in each.get("metrics", {})
    ][-1]
    assert window.page.locator(".card dd span").last.get_attribute("title") == whole
    shown = window.page.locator("#values td.number").all_inner_texts()
    digits = [
        sum(letter.isdigit() for letter in text.split(" @")[0].partition("e")[0].lstrip("0."))
        for text in shown
    ]
    assert digits and max(digits) <= 8  # values that are close to each other need more than five
    rates = [
        each
        for each in window.page.locator("#values th[scope=row]").all_inner_texts()
        if each.startswith("lr")
    ]
    assert rates == ["lr"]
    assert window.page.evaluate("view.charts[0].plot.axes[0]._splits").count(1.5) == 0


def test_the_timeline_of_hooks_is_read_from_the_keyboard_and_names_stay_text(window: Opened) -> None:
    path = written("run", metrics(1, loss=1.0), metrics(2, loss=0.5))
    traced(
        path,
        ("slow", "on_step_end", 0, 900_000, 1),
        (MARKUP, "on_step_end", 950_000, 50_000, 1),
        ("slow", "on_step_end", 5_000_000, 100_000, 2),
    )
    window.show(address(write_report([path])[0]))
    canvas = window.page.locator("#timeline canvas").first
    canvas.focus()
    canvas.press("ArrowRight")
    canvas.press("ArrowLeft")
    said = window.page.locator("#timeline p.at").inner_text()
    assert (
        said.startswith("slow, 0 to ")
        and "1 calls" in said
        and said.endswith("the longest 900 ms in on_step_end at step 1")
    )
    assert window.page.locator("#timeline .names span").all_inner_texts() == ["slow", MARKUP]
    assert window.page.evaluate("window.hacked") is None and window.trouble == []


def test_many_records_do_not_freeze_it(window: Opened) -> None:
    count = 1_000_000 if THOROUGH else 200_000
    high = count * 2 // 3
    Path("run").mkdir()
    with Path("run/log.jsonl").open("w") as log:
        for step in range(1, count + 1):
            log.write(
                f'{{"type": "metrics", "time": {1.7e9 + step}, "step": {step}, "epoch": 0, "metrics": {{"loss": {100.0 if step == high else 1 / step}}}}}\n'
            )
    window.show(address(write_report(["run"])[0]))
    page = window.page
    drawn = json.loads(page.evaluate("JSON.stringify(shown.sections[0].charts[0].series[0])"))
    assert drawn["of"] == count and len(drawn["x"]) <= 1000 and drawn["y"][drawn["x"].index(high)] == 100
    assert page.locator("#values td").nth(2).inner_text() == f"100 @ {high:,}"
    # a page that does something answers late: what it does for one press of a key is measured in its own frames
    page.evaluate("""window.longest = 0; let last = performance.now();
        const tick = (now) => { longest = Math.max(longest, now - last); last = now; requestAnimationFrame(tick); }; requestAnimationFrame(tick);""")
    for weight in ("0.9", "0.5", "0"):
        page.get_by_label("Smoothing").fill(weight)
    page.locator(".plot").first.focus()
    for key in ("ArrowRight", "+", "+", "-", "0"):
        page.keyboard.press(key)
    page.wait_for_timeout(200)
    assert page.evaluate("longest") < 60_000  # a page that drew them all would stand still for minutes
    assert window.trouble == window.elsewhere == []


def test_metrics_with_the_names_of_javascripts_own_things_are_drawn_and_numbers_far_from_zero_are_told_apart(
    window: Opened,
) -> None:
    names = ("constructor", "toString/x", "__proto__", "hasOwnProperty", "val/constructor")
    rows = [metrics(step, far=round(-123456.79 - step / 50, 2)) for step in range(50)]
    for row in rows:
        row["metrics"] |= dict.fromkeys(names, 1.0 / (row["step"] + 1))
    rows[-1]["metrics"]["third"] = 1 / 3
    window.show(address(write_report([written("run", *rows)])[0]))
    scroll_through(window.page)
    wait_until(window.page, "view.charts.length > 5 && view.charts.every((chart) => chart.plot)")
    cell = "[...document.querySelectorAll('#values tr')].find((row) => row.cells[0].textContent === '%s').cells[1].textContent"
    assert (
        window.page.evaluate(cell % "far") == "-123457.77"
        and window.page.evaluate(cell % "third") == "0.33333"
    )
    assert window.page.get_by_title("0.3333333333333333").count() == 3  # last, lowest and highest
    far = "view.charts.find((chart) => chart.series[0].name === 'far')"
    assert window.page.evaluate(f"{far}.values[0].textContent") == "-123457.77"
    ticks = window.page.evaluate(f"labels({far}.plot.axes[1]._splits)")
    assert len(ticks) > 2 and len(set(ticks)) == len(ticks)
    assert window.trouble == []


def test_the_ninth_run_and_the_ninth_curve_do_not_look_like_the_first(window: Opened) -> None:
    runs = [
        written(
            f"run{index}",
            *[metrics(step, train__loss=index + step, val__loss=index - step) for step in range(3)],
        )
        for index in range(18)
    ]
    many = written(
        "many",
        *[metrics(step, **{f"lr__pg{index}": index + step for index in range(18)}) for step in range(3)],
    )
    for pages in (runs, [many]):
        window.show(address(write_report(pages, "page.html")[0]), height=3000)
        looks = window.page.evaluate(
            "view.charts[0].series.map((each, index) => JSON.stringify(view.charts[0].look(each, index)))"
        )
        assert len(looks) >= 18 and len(set(looks)) == len(looks) and window.trouble == []


def test_a_run_that_is_over_and_called_no_hook_says_so(window: Opened) -> None:
    cost = "document.getElementById('cost').textContent"
    for records, said in (
        ([metrics(1, loss=1.0)], "no cost record yet"),
        ([metrics(1, loss=1.0), {"type": "end", "step": 1, "status": "completed"}], "no hook was called"),
    ):
        window.show(address(write_report([written("run", *records)])[0]))
        assert said in window.page.evaluate(cost)


def test_a_strip_of_digests_marks_where_runs_diverge(window: Opened) -> None:
    for folder, hooks in (("one", []), ("other", [AtStepEnd(4, nudge("last.bias"))])):
        torch.manual_seed(3)
        options = {"digest": True, "log_every_n_steps": 1}
        quiet(run_dir=folder, seed=1, logger=True, hooks=hooks, **options).fit(Planted(), samples())
    window.show(address(write_report(["other"], against="one")[0]))
    page = window.page
    strip = page.locator("#digests svg")
    assert strip.get_attribute("aria-label") == "Digests: 3 equal, 3 different"
    titles = [each.text_content() for each in strip.locator("rect title").all()]
    assert titles[2:4] == ["step 3: equal to one", "step 4: different"]
    fills = page.evaluate(
        "[...document.querySelectorAll('#digests rect')].map((each) => getComputedStyle(each).fill)"
    )
    assert len(set(fills[:3])) == len(set(fills[3:])) == 1 and fills[0] != fills[3]
    assert page.locator("#digests .verdict").inner_text().startswith("diverges at step 4 weights:")
    assert window.trouble == window.elsewhere == []
