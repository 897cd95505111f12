"""`trainer.auditing` in real runs: probes that are attached, the log, the report, several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from control.asking import Steps, asked
from ranks.torchrun import torchrun
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.loggers import read_log
from hookline.report.page import write_report

PROBES = """
import torch
from hookline import Hook

class Quiet(Hook):
    seen = 0
    def on_step_end(self, module, step):
        self.seen += float(module.layer.weight.detach().norm()) > 0

class Spoils(Hook):
    def on_step_end(self, module, step):
        torch.rand(1)

class Allowed(Hook):
    observes = False
    def on_step_end(self, module, step):
        torch.rand(1)
"""


def attached(name: str) -> tuple[str, dict[str, Any]]:
    return "attach", {"file": f"{Path('probes.py').resolve()}:{name}"}


def test_internal_hooks_of_a_dialect_are_left_out() -> None:
    class Draws(Hook):
        def on_step_end(self) -> None:
            torch.rand(1)

    class Internal(Draws):
        is_internal = True

    trainer = quiet(hooks=[Internal(), Draws()], audit=True)
    trainer.fit(Net(), batches(2))
    assert {row.hook for row in trainer.hooks.changes()} == {"draws"}


@pytest.mark.parametrize("audit", [False, True])
def test_a_probe_that_changes_something_is_detached_and_reported(
    audit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Path("probes.py").write_text(PROBES)
    answers, trainer = asked(
        attached("Quiet"), attached("Spoils"), attached("Allowed"), Steps(8), audit=audit
    )
    assert [each["hook"] for each in answers[:3]] == ["quiet", "spoils", "allowed"]
    assert trainer.status == "stopped"  # the run was not ended by the probe
    assert {"quiet", "allowed"} <= set(trainer.hooks.list_hooks())
    assert "spoils" not in trainer.hooks
    assert "'spoils' was attached to observe and is detached" in caplog.text
    assert "random streams (torch)" in caplog.text
    [detached] = [
        each
        for each in read_log("run/log.jsonl")
        if each["type"] == "control" and each["command"] == "detach"
    ]
    assert detached["hook"] == "spoils" and "random streams (torch)" in detached["reason"]
    if audit:
        assert {row.hook for row in trainer.hooks.changes()} == {"spoils", "allowed"}


def test_a_probe_is_detached_if_it_also_raises_and_its_successor_may_change_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raises = "class Raises(Spoils):\n    on_error = 'warn'\n    def on_step_end(self, module, step):\n"
    raises += "        super().on_step_end(module, step)\n        raise ValueError\n"
    Path("probes.py").write_text(f"{PROBES}\n{raises}")
    (_, quiet_probe), (_, allowed) = attached("Quiet"), attached("Allowed")
    _, trainer = asked(
        attached("Raises"),
        ("attach", {**quiet_probe, "name": "probe"}),
        Steps(2),
        ("attach", {**allowed, "name": "probe"}),
        Steps(4),
    )
    assert "raises" not in trainer.hooks and "'raises' was attached to observe" in caplog.text
    assert "probe" in trainer.hooks


class Spoils(Hook):
    def on_step_end(self, module: Any, step: int) -> None:
        if step == 2:
            module.layer.weight.data.add_(1)


def test_the_table_is_in_the_log_and_on_the_report_page(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(
        hooks=[Spoils()], audit=True, run_dir="run", logger=True, enable_progress_bar=True, max_epochs=1
    )
    trainer.fit(Net(), batches(4))
    [record] = [each for each in read_log("run/log.jsonl") if each["type"] == "changes"]
    assert record["rows"] == [
        {
            "hook": "spoils",
            "event": "on_step_end",
            "kind": "parameters",
            "names": ["layer.weight"],
            "count": 1,
            "first_step": 2,
            "rank": 0,
        }
    ]
    printed = capsys.readouterr().err
    assert "Audit: what hooks have changed:" in printed and "layer.weight" in printed
    write_report(["run"], "report.html")
    assert "layer.weight" in Path("report.html").read_text()


def test_a_second_run_starts_with_an_empty_table() -> None:
    trainer = quiet(hooks=[Spoils()], audit=True, max_epochs=1)
    trainer.fit(Net(), batches(4))
    assert len(trainer.hooks.changes()) == 1
    trainer.validate(Net(), batches(1))
    assert trainer.hooks.changes() == []
    assert trainer.plan.tracers == ()


def test_a_run_without_changes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(audit=True, enable_progress_bar=True, max_epochs=1).fit(Net(), batches(2))
    assert "Audit: no hook has changed anything." in capsys.readouterr().err


RANKS = """
import json
import torch
from tiny import Net, batches, quiet
from hookline import FSDP, Hook

class OnRankOne(Hook):
    ranks = [1]
    def on_step_end(self, step):
        if step == 3:
            torch.rand(1)

class OnAll(Hook):
    def on_step_end(self, module, step):
        if step == 2:
            with torch.no_grad():
                module.layer.weight.mul_(0.5)

class Reads(Hook):
    observes = True
    def on_step_end(self, module, loss, grad_norm): ...

for strategy in ("ddp", FSDP()):
    trainer = quiet(hooks=[OnRankOne(), OnAll(), Reads()], audit=True, strategy=strategy, max_epochs=1)
    trainer.fit(Net(), batches(8))
    if trainer.strategy.rank == 0:
        print("SAID", json.dumps([[row.hook, row.kind, row.first_step, row.rank, row.names] for row in trainer.hooks.changes()]))
"""


def test_the_table_has_the_changes_of_all_ranks(tmp_path: Path) -> None:
    done = torchrun(RANKS, tmp_path)
    assert done.code == 0, done.output
    assert [json.loads(line) for line in done.lines("SAID")] == [
        [
            ["on_all", "parameters", 2, 0, ["layer.weight"]],
            ["on_all", "parameters", 2, 1, ["layer.weight"]],
            ["on_rank_one", "random streams", 3, 1, ["torch"]],
        ]
    ] * 2
