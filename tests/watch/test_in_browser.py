"""The live page in a real browser, with a job that really runs: updates arrive, switches work, strangers do not get in."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browsing import Opened, in_browser, scroll_through, wait_until
from watch.watching import job, served

from hookline.control.client import NotRunning, ask
from hookline.loggers import read_log
from hookline.watch import Watch

pytestmark = in_browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One job for all tests."""
    with job(tmp_path_factory.mktemp("watched")) as path:
        yield path


@pytest.fixture
def watch(run: Path) -> Iterator[Watch]:
    with served(run) as made:
        yield made


@pytest.fixture
def live(browser: Any, watch: Watch) -> Iterator[Opened]:
    made = Opened(browser, watch.url)
    yield made
    assert made.trouble == []
    assert all(each.startswith((f"http://127.0.0.1:{watch.port}/", "data:")) for each in made.asked)
    made.page.close()


def is_stopping(run: Path) -> bool:
    try:
        return bool(ask(run, "status")["stopping"])
    except NotRunning:
        return True


def hooks(run: Path) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in ask(run, "status")["hooks"]}


def test_updates_arrive_without_a_reload_and_equal_the_log(live: Opened, run: Path) -> None:
    page = live.page
    scroll_through(page)
    page.evaluate("window.here = true; scrollTo(0, 900)")
    first = page.evaluate("shown.runs[0].step")
    wait_until(
        page,
        f"shown.runs[0].step > {first} + 10 && view.charts[0].plot && view.charts[0].plot.scales.x.max > {first} + 5",
    )
    assert page.evaluate("window.here") is True
    last_step, last = page.evaluate("[shown.summary[0].last_step, shown.summary[0].last]")
    logged = {
        each["step"]: each["metrics"]["train/loss"]
        for each in read_log(run)
        if each["type"] == "metrics" and "lr" in each["metrics"] and "train/loss" in each["metrics"]
    }
    assert page.evaluate("shown.summary[0].name") == "train/loss" and logged[last_step] == last
    assert page.locator("#tools [role=status]").inner_text() == "live"


def test_costs_that_are_not_measured_are_not_shown_as_zeros(browser: Any, tmp_path: Path) -> None:
    with job(tmp_path, audit={"costs": False}) as unmeasured, served(unmeasured) as watch:
        made = Opened(browser, watch.url)
        table = made.page.locator("#job table")
        assert "costs are not measured" in table.locator("caption").inner_text()
        assert table.locator("tbody tr").first.locator("td.number").all_inner_texts() == ["–"] * 4
        made.page.close()


def test_the_measured_costs_of_hooks_are_shown(live: Opened) -> None:
    table = live.page.locator("#job table")
    assert "measured" not in table.locator("caption").inner_text()
    assert "–" not in table.locator("tbody tr").first.locator("td.number").all_inner_texts()


def test_the_job_says_how_far_it_is_in_the_words_of_the_report(live: Opened) -> None:
    line = live.page.locator("#job p").first.inner_text()
    assert re.search(r"training step [\d,]+, .*(epoch|batch)", line), line


def test_what_a_reader_looks_at_stays_in_view(live: Opened) -> None:
    page = live.page
    page.locator(".plot").first.focus()
    wait_until(page, "view.charts[0].plot && view.charts[0].plot.data[0].length > 5")
    whole = page.evaluate("view.charts[0].plot.scales.x.max")
    for key in ("ArrowRight", "+", "+"):
        page.keyboard.press(key)
    wait_until(page, f"view.charts[0].plot.scales.x.max < {whole}")
    zoom = page.evaluate("view.charts[0].plot.scales.x.max")
    step = page.evaluate("shown.runs[0].step")
    wait_until(page, f"shown.runs[0].step > {step} + 5")
    assert page.evaluate("view.charts[0].plot.scales.x.max") == zoom
    assert page.evaluate("document.activeElement.className") == "plot"


def test_a_hook_is_switched_off_and_on_by_mouse_and_keyboard(live: Opened, run: Path) -> None:
    switch = live.page.get_by_role("switch", name="Hook gradient_monitor")
    switch.click()
    wait_until(
        live.page,
        "document.querySelector('[aria-label=\"Hook gradient_monitor\"]').getAttribute('aria-checked') === 'false'",
    )
    assert hooks(run)["gradient_monitor"]["enabled"] is False
    assert live.page.locator(".said").inner_text().startswith("disable gradient_monitor: done at step ")
    switch.focus()
    live.page.keyboard.press("Space")
    wait_until(
        live.page,
        "document.querySelector('[aria-label=\"Hook gradient_monitor\"]').getAttribute('aria-checked') === 'true'",
    )
    assert hooks(run)["gradient_monitor"]["enabled"] is True
    wait_until(live.page, "document.getElementById('events').textContent.includes('enable gradient_monitor')")


def test_how_often_is_set_a_checkpoint_is_saved_and_what_is_wrong_is_said(live: Opened, run: Path) -> None:
    page = live.page
    often = page.get_by_label("How often gradient_monitor is called")
    often.fill("7 stepps")
    often.press("Enter")
    wait_until(page, "document.querySelector('.said.bad') !== null")
    assert "Did you mean 'step'?" in page.locator(".said").inner_text()
    often.fill("7 steps")
    often.press("Enter")
    wait_until(page, "document.querySelector('.said').textContent.includes('done at step')")
    assert hooks(run)["gradient_monitor"]["every"] == "every 7"
    page.get_by_role("button", name="save a checkpoint").click()
    wait_until(page, "document.getElementById('checkpoints') !== null")
    assert list((run / "checkpoints").glob("step-*/manifest.json"))


def test_a_hook_is_attached_and_its_name_is_text_whatever_is_in_it(
    live: Opened, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "probe.py").write_text(
        "from hookline import Hook\nclass Probe(Hook):\n    name = '<b>bold</b>'\n    def on_step_end(self): ...\n"
    )
    field = live.page.get_by_label("Hook to attach, a file and a class")
    field.fill(f"{tmp_path}/probe.py:Probe")
    field.press("Enter")
    wait_until(
        live.page,
        "[...document.querySelectorAll('.job tbody th')].some((each) => each.textContent.startsWith('<b>bold</b>'))",
    )
    assert live.page.locator(".job b, .job img").count() == 0 and live.page.evaluate("window.hacked") is None
    assert "<b>bold</b>" in hooks(run)
    assert (
        live.page.get_by_role("button", name="Detach gradient_monitor").count() == 0
    )  # a hook of the program stays
    live.page.get_by_role("button", name="Detach <b>bold</b>").click()
    wait_until(
        live.page,
        "![...document.querySelectorAll('.job tbody th')].some((each) => each.textContent.startsWith('<b>bold</b>'))",
    )
    assert "<b>bold</b>" not in hooks(run)


def test_what_is_typed_and_answered_stays_when_another_user_attaches_a_hook(
    live: Opened, run: Path, tmp_path: Path
) -> None:
    page = live.page
    for name in ("mine", "theirs"):
        (tmp_path / f"{name}.py").write_text(
            "from hookline import Hook\nclass Probe(Hook):\n    def on_step_end(self): ...\n"
        )
    often = page.get_by_label("How often gradient_monitor is called")
    before = often.input_value()
    often.fill("7 stepps")
    often.press("Enter")
    wait_until(page, "document.querySelector('.said.bad') !== null")
    assert often.input_value() == before  # the current interval is shown again
    field = page.get_by_label("Hook to attach, a file and a class")
    field.type(f"{tmp_path}/mi")
    ask(run, "attach", file=f"{tmp_path}/theirs.py:Probe", name="theirs")
    wait_until(page, "document.querySelector('[aria-label=\"Hook theirs\"]') !== null")
    page.keyboard.type("ne.py:Probe")
    assert field.input_value() == f"{tmp_path}/mine.py:Probe"
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('[aria-label=\"Hook probe\"]') !== null")
    step = page.evaluate("shown.runs[0].step")
    wait_until(page, f"shown.runs[0].step > {step} + 20")
    assert (
        page.locator(".said").inner_text().startswith("attach probe: done at step ")
        and field.input_value() == ""
    )


@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (360, "dark")])
def test_it_fits_a_laptop_and_a_phone_in_light_and_dark(
    browser: Any, watch: Watch, width: int, scheme: str
) -> None:
    made = Opened(browser, watch.url, viewport={"width": width, "height": 760}, color_scheme=scheme)
    scroll_through(made.page)
    assert made.page.evaluate("document.documentElement.scrollWidth") <= width
    assert made.page.evaluate("document.documentElement.dataset.theme") == scheme
    switch = made.page.get_by_role("switch").first.bounding_box()
    assert switch["height"] >= 30 and made.trouble == []
    made.page.close()


EVIL = """<!doctype html><title>evil</title><canvas></canvas><script>
window.came = [];
const at = "http://127.0.0.1:%d" + "%s"; // the room, should anybody ever learn it
const note = (name) => (problem) => came.push([name, problem instanceof Error ? "refused" : "answered"]);
Promise.allSettled([
  fetch(at + "control", { method: "POST", credentials: "include", headers: { "Content-Type": "application/json" }, body: '{"command": "stop"}' }).then(note("json"), note("json")),
  fetch(at + "control", { method: "POST", credentials: "include", mode: "no-cors", body: '{"command": "stop"}' }).then(() => 0, () => 0),
  fetch(at, { credentials: "include" }).then(note("page"), note("page")),
  new Promise((done) => { const feed = new EventSource(at + "feed", { withCredentials: true }); feed.onmessage = note("feed"); feed.onerror = () => { came.push(["feed", "refused"]); feed.close(); done(); }; }),
]).then(() => { window.over = true; });
</script><form action="http://127.0.0.1:%d%scontrol" method="post" enctype="text/plain" target="out"><input name='{"command": "stop", "x": "' value='"}'></form>
<iframe name="out"></iframe><script>document.forms[0].submit()</script>"""


def test_a_page_of_another_origin_gets_nothing_and_stops_nothing_with_the_browsers_own_cookie(
    browser: Any, watch: Watch, run: Path
) -> None:
    cookies: list[str | None] = []

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cookies.append(self.headers.get("Cookie"))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write((EVIL % (watch.port, watch.room, watch.port, watch.room)).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        context = browser.new_context()
        own = context.new_page()
        own.goto(watch.url)
        own.wait_for_selector("canvas")
        for host in ("127.0.0.1", "localhost"):  # the same site on another port, and another site
            evil = context.new_page()
            evil.goto(f"http://{host}:{server.server_address[1]}/")
            wait_until(evil, "window.over === true")
            assert sorted(evil.evaluate("came")) == [
                ["feed", "refused"],
                ["json", "refused"],
                ["page", "refused"],
            ]
            evil.wait_for_timeout(300)
            evil.close()
        context.close()
        server.shutdown()
    assert len(cookies) >= 2 and set(cookies) == {
        None
    }  # cookies know no ports, and this one would control the job
    assert ask(run, "status")["stopping"] is False
    assert "stop" not in [each["command"] for each in read_log(run) if each["type"] == "control"]


def test_the_run_is_stopped_from_the_page_and_then_only_looked_at(live: Opened, run: Path) -> None:
    page = live.page
    page.get_by_role("button", name="stop after this step").dblclick()
    again = page.get_by_role("button", name="press again to stop the run")
    again.wait_for()
    assert ask(run, "status")["stopping"] is False  # it asks back, and a double click is no answer
    page.wait_for_timeout(600)
    while not is_stopping(
        run
    ):  # a busy machine may take longer for a click than the page waits for the second one
        page.locator("button.danger").click()
        page.wait_for_timeout(600)
    wait_until(page, "document.getElementById('job').textContent.includes('Read-only')")
    wait_until(page, "document.querySelector('#top .badge').textContent === 'stopped'")
    assert page.get_by_role("switch").count() == 0
    wait_until(page, "document.querySelectorAll('#cost tbody tr').length > 0")
