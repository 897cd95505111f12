"""The live page is read while the run continues: what the reader scrolls, opens and selects stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Opened, in_browser, wait_until
from report.reported import metrics, traced, written
from watch.watching import served

from hookline.watch import server

pytestmark = in_browser
PHONE = {"width": 390, "height": 740}


def step(number: int) -> list[dict[str, Any]]:
    return [
        metrics(
            number,
            lr=0.1,
            train__loss=1.0 / number,
            grad_norm__first=float(number),
            grad_norm__second=1.0 / number,
        ),
        {"type": "text", "step": number, "tag": "sample", "text": f"text of step {number}"},
    ]


def call(number: int) -> dict[str, Any]:
    return {
        "name": "slow",
        "cat": "hook",
        "ph": "X",
        "pid": 0,
        "args": {"event": "on_step_end", "step": number},
        "ts": number * 1e6,
        "dur": 5e5,
    }


@pytest.fixture
def going_on(browser: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A page on a phone, and a way to let the run go on by a step."""
    monkeypatch.setattr(server, "UPDATE_INTERVAL", 0.05)
    path = written(
        "run",
        {"type": "hyperparams", "params": {"width": 3}},
        *[each for number in range(1, 6) for each in step(number)],
    )
    trace = traced(
        path, *[("slow", "on_step_end", number * 1e6, 5e5, number) for number in range(1, 6)], closed=False
    )
    with served(path) as watch:
        made = Opened(browser, watch.url, viewport=PHONE)
        last = 5

        def go_on() -> None:
            nonlocal last
            last += 1
            with trace.open("a") as file:
                file.write(json.dumps(call(last)) + ",\n")
            with Path("run/log.jsonl").open("a") as log:
                log.writelines(json.dumps({"time": 1.7e9 + last, **each}) + "\n" for each in step(last))
            wait_until(
                made.page, f"shown.runs[0].step === {last} && shown.timeline[0].lanes[0].calls === {last}"
            )

        yield made.page, go_on
        assert made.trouble == []
        made.page.close()


def test_a_reader_keeps_place_focus_scroll_and_selection_while_the_run_continues(
    going_on: tuple[Any, Callable[[], None]],
) -> None:
    page, go_on = going_on
    reading = "document.activeElement.closest('.card').querySelector('.at').textContent"
    page.locator(".plot").first.focus()
    wait_until(page, "view.charts[0].plot")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    left = page.evaluate("view.charts[0].plot.cursor.left")
    assert page.evaluate(reading).startswith("step ")
    page.evaluate("""document.querySelector('#values .scroll').scrollLeft = 60; document.querySelector('#text details').open = true;
        getSelection().selectAllChildren(document.querySelector('#configuration td'));""")
    scrolled, selected = page.evaluate(
        "[document.querySelector('#values .scroll').scrollLeft, String(getSelection())]"
    )
    assert scrolled > 0 and selected
    for _ in range(2):
        go_on()
        assert page.evaluate("document.activeElement.className") == "plot" and page.evaluate(
            reading
        ).startswith("step ")
        assert page.evaluate("view.charts[0].plot.cursor.left") == left
        assert page.evaluate("document.querySelector('#values .scroll').scrollLeft") == scrolled
        assert page.evaluate("document.querySelector('#text details').open") is True
        assert page.evaluate("String(getSelection())") == selected
    assert page.locator("#text section > pre").inner_text() == "text of step 7"  # and what is new is there
    for part, said in (("#gradients", "second, step 2: 0.5"), ("#timeline", "slow, ")):
        page.locator(f"{part} .heat canvas").focus()
        for key in ("ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        assert page.evaluate(reading).startswith(said)
        go_on()
        assert page.evaluate("document.activeElement.tagName") == "CANVAS" and page.evaluate(
            reading
        ).startswith(said)


def test_a_page_that_stands_still_says_so_until_it_continues(
    going_on: tuple[Any, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, go_on = going_on
    sign = "document.querySelector('#tools [role=status]').textContent"
    wait_until(page, f"{sign} === 'live'")
    with monkeypatch.context() as broken:
        broken.setattr(server, "page_data", lambda runs: 1 // 0)
        with Path("run/log.jsonl").open("a") as log:
            log.write(json.dumps(metrics(1, loss=1.0)) + "\n")
        wait_until(page, f"{sign} === 'not updated'")
        assert page.reload().status == 200
        assert (
            "This page is not updated" in page.locator("[role=alert]").inner_text()
            and "ZeroDivisionError" in page.locator("[role=alert]").inner_text()
        )
    wait_until(page, f"{sign} === 'live' && !document.querySelector('[role=alert]')")
    go_on()
