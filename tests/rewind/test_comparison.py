"""Rows of a run beside those of its log, and the machine beside the recorded one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny import Net, batches, quiet

from hookline.rewind.comparison import (
    Difference,
    RowCollector,
    compare,
    environment_differences,
    recorded_rows,
)
from hookline.run.provenance import describe_machine, versions


def collected(**rows: dict[str, float]) -> RowCollector:
    made = RowCollector()
    for key, row in rows.items():
        made.log_metrics(row, int(key[1:]), 0, "step")
    return made


def test_one_bit_is_a_difference_and_nan_is_not() -> None:
    near = math.nextafter(0.1, 1)
    known = {"a": 0.1, "b": "nan", "c": 0.0, "d": 3.0}
    now = collected(s1={"a": near, "b": math.nan, "c": -0.0, "d": torch.tensor(3.0)})  # type: ignore[dict-item]
    found = compare({(1, "step"): known}, now.rows)
    assert found.differences == [Difference(1, "step", "a", 0.1, near), Difference(1, "step", "c", 0.0, -0.0)]
    assert found.values == 4 and found.steps == [1]
    assert str(found.differences[0]) == f"step 1: a was 0.1, and is now {near}"


def test_values_without_a_recorded_one_are_new_and_patterns_are_ignored() -> None:
    now = collected(s1={"loss": 1.0, "probe/x": 2.0}, s2={"loss": 5.0, "time/step": 1.0})
    recorded = {
        (1, "step"): {"loss": 1.0},
        (2, "step"): {"loss": 4.0, "time/step": 9.0},
        (3, "step"): {"loss": 1.0},
    }
    found = compare(recorded, now.rows, ignore=["time/*"])
    assert found.new == {(1, "step"): {"probe/x": 2.0}}
    assert [each.name for each in found.differences] == ["loss"] and found.values == 2


def test_rows_of_one_step_and_scope_are_one_row() -> None:
    records = [
        {"step": 1, "over": "step", "metrics": {"a": 1}},
        {"step": 1, "over": "epoch", "metrics": {"a": 2}},
        {"step": 1, "over": "step", "metrics": {"b": 3}},
        {"step": 1, "metrics": None},
    ]
    assert recorded_rows(records) == {(1, "step"): {"a": 1, "b": 3}, (1, "epoch"): {"a": 2}}


def test_a_rollback_drops_the_rows_after_its_step() -> None:
    rows = collected(s1={"a": 1.0}, s2={"a": 2.0}, s3={"a": 3.0})
    rows.resume(None, 2, 0, Path())
    assert [step for step, _ in rows.rows] == [1, 2]
    rows.add_scalar("tag", torch.tensor(2), 9)
    rows.add_text("note", "text", 9)
    rows.log_event("control", {"command": "detach", "hook": "probe", "reason": "why"})
    assert rows.rows[9, ""] == {"tag": 2} and rows.texts == [(9, "note", "text")]
    assert rows.detached == {"probe": "why"}


def test_only_what_may_change_bits_is_a_difference_of_the_environment() -> None:
    trainer = quiet(max_steps=1)
    trainer.fit(Net(), batches(1))
    run: Any = trainer._last
    machine, here = describe_machine(run), versions()
    record = {"versions": dict(here), "machine": dict(machine), "git": {"commit": None}}
    assert environment_differences(record, run) == []
    record["machine"] |= {"host": "another", "cpus": 99, "system": "Plan 9"}
    record["versions"]["absent"] = "1.0"
    assert environment_differences(record, run) == []
    record["machine"] |= {"cpu": "Z80", "threads": 99, "precision": "16-mixed"}
    record["versions"]["torch"] = "1.0"
    record["git"]["commit"] = "f" * 40
    found = environment_differences(record, run)
    assert [each.split()[0] for each in found][:4] == ["torch", "cpu", "threads", "precision"]
    old = {"machine": {"host": "another"}}  # an older record has no processor
    assert environment_differences(old, run) == [f"host another there, {machine['host']} here"]
    assert (
        environment_differences({}, SimpleNamespace(**{n: getattr(run, n) for n in ("strategy", "state")}))
        == []
    )  # type: ignore[arg-type]
