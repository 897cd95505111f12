"""Webhook: messages that arrive, failures that do not matter, and an address that nobody sees."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from servers import Server, nobody_at, serving
from tiny import Net, batches, quiet

from hookline import Recorder, Trainer
from hookline.distributed.single import SingleDevice
from hookline.hooks.webhook import TEMPLATES, Webhook
from hookline.util.errors import HookError, OptionError

SECRET = "s3cr3t-t0ken"
PATH = f"/services/T0/B0/{SECRET}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in servers.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def texts(server: Server) -> list[str]:
    return [json.loads(body)["text"] for body in server.bodies]


def told(*, module: Net | None = None, val: bool = True, **options: Any) -> list[str]:
    """The messages of a run of two epochs."""
    with serving() as server:
        quiet(max_epochs=2, hooks=[Webhook(server.url(PATH), **options)]).fit(
            module or Net(), batches(2), batches(1) if val else None
        )
    assert all(method == "POST" and path == PATH for method, path, _ in server.got)
    return texts(server)


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("broken")


class Worsens(Net):
    """Its validation losses are 1, 2, 3, ..."""

    seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return {"loss": super().validation_step(batch, batch_idx) * 0 + float(self.seen)}


# ---- what is told ------------------------------------------------------------------------------------------------


def test_the_end_of_training_is_told_with_its_results() -> None:
    *_, last = told()
    assert "training completed in epoch 1, step 4." in last
    assert "val/loss" in last and "train/loss" in last and last.startswith("Net on ")


def test_a_new_best_is_told_and_a_worse_result_is_not() -> None:
    assert sum("new best" in text for text in told(module=Worsens())) == 1
    assert sum("new best val/loss" in text for text in told(module=Worsens(), mode="max")) == 2
    assert (
        "new best val/loss 1.0000 in epoch 0, step 2" in told(module=Worsens(), notify_on=["best_model"])[0]
    )


def test_the_best_survives_a_resume(tmp_path: Path) -> None:
    with serving() as server:
        first = quiet(hooks=[Webhook(server.url(PATH), notify_on=["best_model"])])
        first.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "one"))
        first.fit(Worsens(), batches(2), batches(1))
        module = Worsens()
        module.seen = 1
        quiet(max_epochs=2, hooks=[Webhook(server.url(PATH), notify_on=["best_model"])]).fit(
            module, batches(2), batches(1), resume=tmp_path / "one"
        )
    assert len(texts(server)) == 1


def test_a_second_run_has_a_best_of_its_own() -> None:
    with serving() as server:
        trainer, module = quiet(hooks=[Webhook(server.url(PATH), notify_on=["best_model"])]), Worsens()
        trainer.fit(module, batches(1), batches(1))
        trainer.fit(module, batches(1), batches(1))
    assert [text.partition(" in ")[0].split(" ")[-1] for text in texts(server)] == ["1.0000", "2.0000"]


def test_a_failure_is_told_before_the_run_is_over() -> None:
    with serving() as server, pytest.raises(RuntimeError, match="broken"):
        quiet(hooks=[Webhook(server.url(PATH))]).fit(Fails(), batches(1))
    (text,) = texts(server)
    assert "fit ended in epoch 0, step 0 by RuntimeError: broken" in text


def test_an_early_stop_is_told_with_its_reason() -> None:
    with serving() as server:
        trainer = quiet(hooks=[Webhook(server.url(PATH), notify_on="training_end")])
        trainer.on("train_batch_end")(lambda trainer: trainer.stop("enough is enough"))
        trainer.fit(Net(), batches(2))
    assert "training stopped" in texts(server)[0] and "enough is enough" in texts(server)[0]


def test_every_event_can_be_asked_for_and_comes_in_order(tmp_path: Path) -> None:
    with serving() as server:
        trainer = quiet(
            run_dir=tmp_path,
            num_sanity_val_steps=1,
            hooks=[Webhook(server.url(PATH), notify_on=TEMPLATES, template="{event}")],
        )
        trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint())
        trainer.fit(Net(), batches(2), batches(1))
    assert texts(server) == [
        "training_start",
        "validation_end",
        "best_model",
        "epoch_end",
        "checkpoint",
        "training_end",
    ]


def test_templates_name_facts_and_metrics() -> None:
    found = told(
        notify_on=["epoch_end", "training_end"],
        template={"epoch_end": "{epoch}: {val/loss:.1f} {no/metric:.2f} {loss}"},
        module=Worsens(),
    )
    assert found[:2] == ["0: 1.0 ? ?", "1: 2.0 ? ?"]
    assert "training completed" in found[2]


def test_a_metric_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert not told(notify_on=["best_model"], monitor="val/los")
    (record,) = caplog.records
    assert "Did you mean 'val/loss'?" in record.getMessage()


def test_the_address_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("MY_HOOK", server.url(PATH))
        quiet(hooks=[Webhook("env:MY_HOOK")]).fit(Net(), batches(1))
    assert len(texts(server)) == 1


# ---- failures that do not matter ---------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (record for record in caplog.records if record.name == "hookline")
    assert record.exc_info is None
    return record.getMessage()


def test_a_service_that_is_down_is_reported_once_and_the_run_goes_on(
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


def test_only_rank_zero_speaks() -> None:
    class Second(SingleDevice):
        rank = 1

    with serving() as server:
        quiet(strategy=Second(torch.device("cpu")), hooks=[Webhook(server.url(PATH))]).fit(Net(), batches(1))
    assert server.got == []


def test_text_that_is_odd_arrives() -> None:
    class Odd(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError('"quoted" {braces} \ud800 ü\n')

    with serving() as server, pytest.raises(ValueError, match="quoted"):
        quiet(hooks=[Webhook(server.url(PATH))]).fit(Odd(), batches(1))
    assert '"quoted" {braces} \ud800 ü' in texts(server)[0]


# ---- the address is a secret -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "wrong",
    [
        f"htps://x/{SECRET}",
        f"/{SECRET}",
        f"http://[{SECRET}",
        f"https://x/{SECRET} ",
        f"http:///{SECRET}",
        b"https://" + SECRET.encode(),
        "",
    ],
    ids=str,
)
def test_a_wrong_address_is_refused_without_being_shown(wrong: Any) -> None:
    with pytest.raises(
        OptionError,
        match="Webhook: url .not shown, it is a secret. must be an address that begins with https://",
    ) as caught:
        Webhook(wrong)
    inner = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    shown = "".join(
        traceback.TracebackException(OptionError, caught.value, inner, capture_locals=True).format()
    )
    assert SECRET not in shown


@pytest.mark.parametrize(
    "wrong",
    [{"notify_on": ["training_ends"]}, {"template": "{epch}"}, {"mode": "least"}, {"timeout": 0}],
    ids=str,
)
def test_other_mistakes_do_not_show_it_either(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Webhook(f"https://example.invalid{PATH}", **wrong)
    inner = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    assert SECRET not in "".join(
        traceback.TracebackException(OptionError, caught.value, inner, capture_locals=True).format()
    )


def test_other_requests_of_the_program_are_still_logged(caplog: pytest.LogCaptureFixture) -> None:
    import httpx

    with serving() as server:
        quiet(hooks=[Webhook(server.url(PATH))]).fit(Net(), batches(1))
        caplog.set_level(logging.INFO, logger="httpx")
        httpx.get(server.url("/mine"))
    assert "/mine" in caplog.text


# ---- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"notify_on": ["training_ends"]},
            r"no event 'training_ends'.*Did you mean 'training_end'\? There are: .*best_model",
        ),
        ({"notify_on": [3]}, "no event 3"),
        ({"template": "{epch}"}, r"unknown field 'epch'. Did you mean 'epoch'\?"),
        ({"template": "{epoch"}, "template='{epoch'"),
        ({"template": "{epoch:q}"}, "template='{epoch:q}'"),
        ({"template": "{best.real}"}, "without dots"),
        ({"template": {"best_modl": "x"}}, r"Did you mean 'best_model'\?"),
        ({"template": {"best_model": 3}}, "template=3 must be text"),
        ({"mode": "least"}, "mode='least', allowed: 'min', 'max'"),
        ({"monitor": ""}, "monitor='' must be the name of a metric"),
        ({"timeout": 0}, "timeout=0 must be a number"),
        ({"queue_size": 0}, "queue_size=0 must be a whole number from 1"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=f"Webhook: .*{says}|Webhook: {says}"):
        Webhook("https://example.invalid/x", **wrong)


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(OptionError, match="Webhook: url: the environment variable NO_SUCH is not set"):
        Webhook("env:NO_SUCH")


def test_without_httpx_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(HookError, match=r"pip install 'hookline\[webhook\]'"):
        Webhook("https://example.invalid/x")
