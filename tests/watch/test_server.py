"""Who gets to see and to switch a run through `hookline watch`, and who does not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.reported import data_in, metrics, written
from watch.watching import Visitor, job, served

from hookline.cli import main
from hookline.control.client import ask
from hookline.loggers import read_log
from hookline.util.errors import OptionError
from hookline.watch import Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    with served(written("run", metrics(1, loss=1.0), metrics(2, loss=0.5))) as made:
        yield made


@pytest.fixture
def visitor(watch: Watch) -> Visitor:
    made = Visitor(watch)
    assert made.come_in().status == 303
    return made


def test_the_printed_address_lets_one_browser_in_and_no_other_after_it(watch: Watch) -> None:
    first, second = Visitor(watch), Visitor(watch)
    url = watch.url.partition(str(watch.port))[2]
    answer = first.come_in()
    room = answer.getheader("Location") or ""
    assert answer.status == 303 and room == watch.room
    cookie = answer.getheader("Set-Cookie") or ""
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and url.partition("=")[2] not in cookie
    assert first.get(room).status == 200 and first.get(room).status == 200  # the same browser, again
    assert first.get(url).status == second.get(url).status == second.get(room).status == 403


def test_the_cookie_is_for_a_path_that_no_other_user_of_this_machine_can_guess(watch: Watch) -> None:
    room = Visitor(watch).come_in().getheader("Location") or ""
    assert len(room) > 20 and room not in watch.url
    other = Watch(watch.run_dir)
    assert other.room != room and f"; Path={room};" not in other.url
    other._server.server_close()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "{room}",
        "{room}feed",
        "/?token=",
        "/?token=wrong",
        "/?token=%00%ff",
        "{room}feed?token=wrong",
        "{room}?token=wrong",
    ],
)
def test_without_token_or_cookie_there_is_nothing_to_see(watch: Watch, path: str) -> None:
    answer = Visitor(watch).get(path.format(room=watch.room))
    assert answer.status == 403 and b"loss" not in answer.read()


@pytest.mark.parametrize(
    "cookie", ["", "hookline=x", "hookline-{port}=", "hookline-{port}=wrong", "hookline-{port}=\xe4", ";;=;"]
)
def test_a_wrong_cookie_is_no_cookie(watch: Watch, cookie: str) -> None:
    visitor = Visitor(watch)
    visitor.cookie = cookie.format(port=watch.port)
    assert visitor.page().status == 403 and visitor.post({"command": "stop"}).status == 403


def test_it_listens_on_this_machine_alone(watch: Watch) -> None:
    others = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), watch.port, socket.AF_INET)} - {
        "127.0.0.1"
    }
    for address in others:
        with pytest.raises(OSError), socket.create_connection((str(address), watch.port), timeout=5):
            pass
    assert watch._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0:{port}", "[::1", ""]
)
def test_a_foreign_name_that_leads_here_is_turned_away(visitor: Visitor, host: str) -> None:
    named = host.format(port=visitor.watch.port) or "x@y"
    assert visitor.page(Host=named).status == 403
    assert visitor.post({"command": "stop"}, Host=named, Origin=f"http://{named}").status == 403


def test_through_a_tunnel_it_may_have_another_port(visitor: Visitor) -> None:
    assert visitor.page(Host="localhost:9999").status == 200
    assert (
        visitor.post({"command": "stop"}, Host="localhost:9999", Origin="http://localhost:9999").status == 200
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": ""},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_page_of_another_origin_cannot_ask_for_anything_even_with_the_cookie(
    visitor: Visitor, headers: dict[str, str]
) -> None:
    given = {name: value.format(port=visitor.watch.port) for name, value in headers.items()}
    answer = visitor.post({"command": "stop"}, **given)
    assert answer.status == 403 and answer.getheader("Access-Control-Allow-Origin") is None
    if "Sec_Fetch_Site" in given:
        assert visitor.get(f"{visitor.watch.room}feed", **given).status == 403


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("stop", {}, 400),
        ([], {}, 400),
        ({"command": "status"}, {}, 400),
        ({"command": ["stop"]}, {}, 400),
        ({"command": "fly"}, {}, 400),
        ({"command": "stop"}, {"Content_Type": "text/plain"}, 400),
        ("x" * 20_000, {}, 400),
    ],
)
def test_what_is_no_request_is_refused(
    visitor: Visitor, body: Any, headers: dict[str, str], status: int
) -> None:
    assert visitor.post(body, **headers).status == status


def test_other_paths_lead_nowhere(visitor: Visitor) -> None:
    room = visitor.watch.room
    for path in (
        "/log.jsonl",
        "/../../etc/passwd",
        "//etc/passwd",
        "/control",
        "/feed",
        f"{room}control",
        f"{room}../log.jsonl",
        room[:-1],
        f"{room[:-3]}/feed",
    ):
        assert visitor.get(path).status == 404
    for path in (room, f"{room}feed", "/control"):
        assert visitor.post({"command": "stop"}, path=path).status == 404


def test_a_mistake_of_hooklines_own_is_answered_in_words(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitor.watch.feed, "page", lambda: 1 // 0)
    answer = visitor.page()
    assert answer.status == 500 and b"ZeroDivisionError" in answer.read()


def test_the_page_may_talk_to_its_own_server_only_and_cannot_be_framed_or_stored(visitor: Visitor) -> None:
    answer = visitor.page()
    page = answer.read().decode()
    assert "; connect-src 'self'" in page and "default-src 'none'" in page
    assert (answer.getheader("X-Frame-Options"), answer.getheader("Cache-Control")) == ("DENY", "no-store")
    data = data_in(page)
    assert data["live"] and data["job"]["running"] is False and data["summary"][0]["last"] == 0.5


def test_a_run_that_has_ended_can_be_looked_at_and_not_switched(visitor: Visitor) -> None:
    answer = json.loads(visitor.post({"command": "stop"}).read())
    assert "No job is training" in answer["error"]


def test_what_is_new_is_pushed_and_only_that(visitor: Visitor) -> None:
    live = data_in(visitor.page().read().decode())["live"]
    feed = visitor.get(f"{visitor.watch.room}feed?from={live}")
    assert feed.getheader("Content-Type") == "text/event-stream"
    with Path("run/log.jsonl").open("a") as log:
        log.write(json.dumps({"time": 1.7e9, **metrics(3, loss=0.25)}) + "\n")
    named, event, data = (feed.readline().decode().rstrip("\n") for _ in range(3))
    assert named.startswith("id: ") and event == "event: update"
    new = json.loads(data.removeprefix("data: "))
    assert new["summary"][0]["last"] == 0.25 and {"sections", "runs"} <= set(new)
    assert not {"config", "pictures", "texts", "versions", "job"} & set(new)
    feed.close()


def test_who_comes_back_gets_what_was_missed_and_who_knows_nothing_gets_all(visitor: Visitor) -> None:
    visitor.page().read()
    for since in ("", "elsewhere-7"):
        feed = visitor.get(f"{visitor.watch.room}feed", Last_Event_ID=since)
        feed.readline(), feed.readline()
        assert {"runs", "config", "sections", "job"} <= set(
            json.loads(feed.readline().decode().removeprefix("data: "))
        )
        feed.close()


def test_a_taken_port_and_a_directory_that_is_no_run_are_told(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError, match=f"--port {watch.port} cannot be used"):
        Watch(Path("run"), watch.port)
    assert main(["watch", "rum"]) == 2 and "Did you mean 'run'?" in capsys.readouterr().err
    Path("empty").mkdir()
    assert main(["watch", "empty"]) == 2 and "is not the directory of a run" in capsys.readouterr().err


def test_a_running_job_is_switched_through_the_server_and_the_log_has_it(tmp_path: Path) -> None:
    with job(tmp_path) as run, served(run) as watch:
        visitor = Visitor(watch)
        visitor.come_in()
        shown = data_in(visitor.page().read().decode())["job"]
        assert shown["running"] and [each["name"] for each in shown["hooks"]][:2] == [
            "naps",
            "gradient_monitor",
        ]
        done = json.loads(
            visitor.post(
                {"command": "disable", "hook": "gradient_monitor", "patience": 0, "more": "x"}
            ).read()
        )
        assert done["hook"] == "gradient_monitor" and done["step"] > 0
        wrong = json.loads(visitor.post({"command": "disable", "hook": "gradient"}).read())
        assert "Did you mean 'gradient_monitor'?" in wrong["error"]
        told = {each["name"]: each["enabled"] for each in ask(run, "status")["hooks"]}
        assert told["gradient_monitor"] is False
        assert [(each["command"], each["step"]) for each in read_log(run) if each["type"] == "control"] == [
            ("disable", done["step"])
        ]
