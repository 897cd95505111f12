"""Requests to a secret address: sent from a thread, and the address is never shown."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servers
from servers import Server, nobody_at, serving
from tiny import Net, batches, quiet

from hookline import Recorder, Trainer
from hookline.hooks.webhook import TEMPLATES, Webhook

SECRET = "s3cr3t-t0ken"


PATH = f"/services/T0/B0/{SECRET}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in servers.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def texts(server: Server) -> list[str]:
    return [json.loads(body)["text"] for body in server.bodies]


def warned(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (record for record in caplog.records if record.name == "hookline")
    assert record.exc_info is None
    return record.getMessage()


def test_a_service_that_is_down_is_reported_once_and_the_run_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = quiet(max_epochs=3, hooks=[Webhook(nobody_at(PATH), notify_on=["epoch_end"])])
    trainer.fit(Net(), batches(1))
    assert trainer.status == "completed"
    assert warned(caplog) == "Webhook: a message was not delivered (ConnectError); the run continues"


def test_a_service_that_refuses_is_reported_with_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    with serving(status=500) as server:
        quiet(hooks=[Webhook(server.url(PATH))]).fit(Net(), batches(1))
    assert "(answered 500)" in warned(caplog)


def test_redirects_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as elsewhere, serving(status=307, headers={"Location": elsewhere.url(PATH)}) as server:
        quiet(hooks=[Webhook(server.url(PATH))]).fit(Net(), batches(1))
    assert len(server.got) == 1
    assert elsewhere.got == []
    assert "(answered 307, and redirects are not followed)" in warned(caplog)


def test_a_service_that_hangs_does_not_hold_up_the_training(caplog: pytest.LogCaptureFixture) -> None:
    with serving(hangs=True) as server:
        trainer = quiet(
            max_epochs=20, hooks=[Webhook(server.url(PATH), notify_on=["epoch_end"], timeout=3, queue_size=4)]
        )
        ended: list[float] = []
        trainer.on("train_end")(lambda: ended.append(time.monotonic()))
        begun = time.monotonic()
        trainer.fit(Net(), batches(1))
        over = time.monotonic()
    assert trainer.status == "completed" and trainer.global_step == 20
    assert ended[0] - begun < 3 * 20  # waiting for each message would take that long, and longer
    assert over - ended[0] < 3 * 4  # the end waits once, not for every message
    outbox = trainer.hooks["webhook"]._outbox
    assert outbox.dropped > 0
    messages = [record.getMessage() for record in caplog.records]
    assert "Webhook: the queue of messages is full; some are dropped" in messages


def test_the_thread_ends_with_the_run_and_a_second_run_has_its_own() -> None:
    with serving() as server:
        trainer = quiet(hooks=[Webhook(server.url(PATH), notify_on=["training_end"])])
        for _ in range(2):
            trainer.fit(Net(), batches(1))
            assert trainer.hooks["webhook"]._outbox._thread is None
    assert len(texts(server)) == 2


def echo() -> Any:
    """A redirect that repeats the address in its headers."""
    return serving(status=302, headers={"Location": f"http://127.0.0.1:9{PATH}"})


@pytest.mark.parametrize(
    "where",
    [serving, lambda: serving(status=404), echo, lambda: serving(hangs=True), None],
    ids=["ok", "404", "redirect", "hangs", "down"],
)
def test_the_address_is_nowhere_to_be_seen(
    where: Callable[[], Any] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything that a run writes, shows or keeps is searched, with all loggers at their loudest."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore", "httpcore.connection", "httpcore.http11", "hookline", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)
    if where is None:
        seen = everything(nobody_at(PATH), tmp_path)
    else:
        with where() as server:
            seen = everything(server.url(PATH), tmp_path)
            assert server.got and all(path == PATH for _, path, _ in server.got)
    captured = capfd.readouterr()
    seen += [captured.out, captured.err]
    seen += [
        f"{record.getMessage()} {record.args} {record.exc_info} {record.exc_text} {vars(record)}"
        for record in caplog.records
    ]
    seen += [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert (
        len([path for path in tmp_path.rglob("*") if path.is_file()]) >= 3
    )  # a log and a checkpoint were there to be searched
    assert not [text for text in seen if SECRET in text]


def everything(url: str, run_dir: Path) -> list[str]:
    """All that can be looked at during and after a run that saves a checkpoint and fails."""
    hook = Webhook(url, notify_on=TEMPLATES, timeout=0.3)
    trainer = Trainer(run_dir=run_dir, max_epochs=2, enable_progress_bar=False, hooks=[hook])
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint())
    trainer.on("train_epoch_start")(lambda epoch: 1 / (1 - epoch))
    shown: list[str] = []
    with Recorder(trainer) as recorder:
        try:
            trainer.fit(Net(), batches(2), batches(1))
        except ZeroDivisionError as error:
            inner = (
                error.__traceback__.tb_next if error.__traceback__ else None
            )  # this very function knows the address
            shown.append(
                "".join(traceback.TracebackException(type(error), error, inner, capture_locals=True).format())
            )
    assert len(shown) == 1
    shown += [
        repr(hook),
        str(hook),
        f"{hook}",
        repr(vars(hook)),
        repr(hook._outbox),
        repr(vars(hook._outbox)),
        repr(hook.state_dict()),
    ]
    shown += [
        repr(copy.deepcopy(vars(hook)["templates"])),
        str(trainer.explain()),
        repr(trainer.hooks.cost()),
        repr(recorder.__dict__),
    ]
    shown += [json.dumps(vars(hook), default=vars_or_text), repr(trainer.state), repr(dict(trainer.state))]
    try:
        shown.append(repr(pickle.dumps(hook)))
    except Exception as error:
        shown.append(str(error))
    return shown


def vars_or_text(value: Any) -> Any:
    """What a careless dump does with an object."""
    return (
        vars(value)
        if hasattr(value, "__dict__")
        else {name: repr(getattr(value, name)) for name in getattr(value, "__slots__", ())} or str(value)
    )


def test_other_requests_of_the_program_are_still_logged(caplog: pytest.LogCaptureFixture) -> None:
    import httpx

    with serving() as server:
        quiet(hooks=[Webhook(server.url(PATH))]).fit(Net(), batches(1))
        caplog.set_level(logging.INFO, logger="httpx")
        httpx.get(server.url("/mine"))
    assert "/mine" in caplog.text
