"""What a live page is fed with: only while a page is open, and whatever happens to the run's files."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from report.reported import metrics, written

from hookline.control.client import listen
from hookline.report import page as report_page
from hookline.watch import server
from hookline.watch.server import Feed


class Counted(Feed):
    looks = 0

    def update(self) -> None:
        self.looks += 1
        super().update()


def until(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]


def test_nothing_is_read_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UPDATE_INTERVAL", 0.01)
    feed = Counted(written("run", metrics(1, loss=1.0)))
    thread = threading.Thread(target=feed.keep_fresh, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert feed.looks == 0
    feed.join()
    until(lambda: feed.looks > 2)
    feed.leave()
    time.sleep(0.1)
    seen = feed.looks
    time.sleep(0.1)
    assert feed.looks <= seen + 1
    feed.end()
    thread.join(60)
    assert not thread.is_alive()


def test_a_page_is_put_together_only_if_something_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    whole = report_page.page_data
    monkeypatch.setattr(server, "page_data", lambda runs: made.append(1) or whole(runs))
    feed = Feed(written("run", metrics(1, loss=1.0)))
    for _ in range(3):
        feed.update()
    assert len(made) == 1
    with Path("run/log.jsonl").open("a") as log:
        log.write(json.dumps({"time": 1.7e9, **metrics(2, loss=1.0)}) + "\n")
    feed.update()
    assert len(made) == 2


def test_a_directory_that_goes_away_leaves_the_page_as_it_was() -> None:
    feed = Feed(written("run", metrics(1, loss=1.0)))
    shutil.rmtree("run")
    assert '"loss"' in feed.page()
    found = feed.wait("", 1.0)
    assert found is not None and json.loads(found[1])["job"] == {
        "running": False,
        "why": "run does not exist.",
    }


def test_a_mistake_in_reading_is_said_and_over_when_reading_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = Feed(path := written("run", metrics(1, loss=1.0)))
    thread = threading.Thread(target=feed.keep_fresh, daemon=True)
    monkeypatch.setattr(server, "UPDATE_INTERVAL", 0.01)
    with monkeypatch.context() as broken:
        broken.setattr(server, "page_data", lambda runs: {}[len(runs)])
        written(path, metrics(1, loss=1.0), metrics(2, loss=0.5))
        feed.join()
        thread.start()
        until(lambda: "KeyError: 1" in _told(feed)["stuck"])
        assert "KeyError: 1" in feed.page() and _told(feed)["job"]["running"] is False
    until(lambda: _told(feed)["stuck"] == "" and _told(feed)["summary"][0]["last"] == 0.5)
    feed.end()
    thread.join(60)
    assert not thread.is_alive()


def test_a_line_that_no_log_should_hold_does_not_end_the_page() -> None:
    feed = Feed(written("run", metrics(1, loss=1.0)))
    with Path("run/log.jsonl").open("a") as log:
        log.write(
            f'{{"type": "metrics", "step": 1{"0" * 400}, "metrics": {{"a": 1}}}}\n{json.dumps(metrics(2, loss=0.5))}\n'
        )
    feed.update()
    assert _told(feed)["runs"][0]["step"] == 2 and _told(feed)["stuck"] == ""


def _told(feed: Feed) -> Any:
    found = feed.wait("", 1.0)
    assert found is not None
    return json.loads(found[1])


def test_what_could_end_the_script_of_the_page_or_a_line_of_the_feed_is_data() -> None:
    feed = Feed(written("run", metrics(1, **{"</script>\n\ndata: x": 1.0, "\u2028": 2.0})))
    assert feed.page().count("</script>") == 2
    found = feed.wait("", 1.0)
    assert found is not None and "\n" not in found[1] and "\r" not in found[1]
    assert {each["name"] for each in json.loads(found[1])["summary"]} == {"</script>\n\ndata: x", "\u2028"}


def test_a_job_that_was_killed_is_told_although_it_wrote_nothing_about_it() -> None:
    path = written("run", {**metrics(1, loss=1.0), "time": time.time()})
    with closing(listen(path)) as listener:
        answers = threading.Thread(target=_answer_all, args=(listener,), daemon=True)
        answers.start()
        feed = Feed(path)
        feed.update()
        assert _statuses(feed) == (True, "training")
        listener.shutdown(socket.SHUT_RDWR)
        answers.join(60)
    feed.update()
    assert _statuses(feed) == (False, "killed, or trains on another machine")


def _answer_all(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if connection.recv(1000):
                    connection.sendall(b'{"status": "training"}\n')


def _statuses(feed: Feed) -> tuple[bool, str]:
    told = _told(feed)
    return told["job"]["running"], told["runs"][0]["status"]
