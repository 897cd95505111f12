"""Webhook: messages that arrive, failures that do not matter, and an address that stays secret."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from servers import Server, serving
from tiny import Net, batches, quiet

from hookline.distributed.base import SingleDevice
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
        ({"mode": "least"}, "mode='least', allowed: 'auto', 'min', 'max'"),
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
    with pytest.raises(HookError, match=r'pip install "hookline\[webhook\]"'):
        Webhook("https://example.invalid/x")
