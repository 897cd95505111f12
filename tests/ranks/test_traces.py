"""Several ranks: a trace each, side by side on one clock; one table of costs; a hook over its budget leaves all of them at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks.torchrun import Outcome, torchrun

from hookline import on
from hookline.tracing.reader import merge, read_trace
from hookline.tracing.replay import replay
from hookline.tracing.report import count, differences_from_plan

SCRIPT = '''
import time
import torch.distributed as dist
from tiny import Net, batches, quiet
from hookline import Hook

class Dear(Hook):
    """Needs all ranks every time, and is too expensive on one of them: had that one alone switched it off, the other would hang."""
    budget, over_budget = "2 ms", "disable"
    heard = 0
    def on_train_batch_end(self, rank):
        self.heard += 1
        dist.barrier()
        if rank == 1 and self.heard > 2:
            time.sleep(0.005)

dear = Dear()
trainer = quiet(hooks=[dear], strategy="ddp", run_dir="run", trace=True, logger=True, enable_progress_bar=True)
trainer.fit(Net(), batches(40))
print("heard", dear.heard, trainer.global_step, flush=True)
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Outcome, Path]]:
    folder = tmp_path_factory.mktemp("ranks")
    yield torchrun(SCRIPT, folder, deadline=300), folder


def load(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_every_rank_writes_a_trace_of_its_own(job: tuple[Outcome, Path]) -> None:
    outcome, folder = job
    assert outcome.code == 0, outcome.output
    for rank, name in enumerate(("trace.json", "trace.rank1.json")):
        records = load(folder / "run" / name)
        assert {each["pid"] for each in records} == {rank}
        assert (records[0]["args"]["rank"], records[0]["args"]["world_size"]) == (rank, 2)


def test_together_they_lie_on_one_clock(job: tuple[Outcome, Path]) -> None:
    _, folder = job
    merge([folder / "run/trace.json", folder / "run/trace.rank1.json"], folder / "both.json")
    spans = {each["pid"]: each for each in load(folder / "both.json") if each["name"] == "epoch 0"}
    first, second = spans[0], spans[1]
    assert first["ts"] < second["ts"] + second["dur"] and second["ts"] < first["ts"] + first["dur"]
    steps: list[int] = []
    replay(folder / "both.json", on("step_end")(lambda step, rank: steps.append(rank)), rank=1)
    assert set(steps) == {1} and len(steps) == len(
        [e for e in load(folder / "run/trace.rank1.json") if e["name"] == "on_step_end"]
    )


def test_a_hook_that_is_too_expensive_on_one_rank_is_switched_off_on_all_at_the_same_batch(
    job: tuple[Outcome, Path],
) -> None:
    outcome, _ = job
    told = [line.split() for line in outcome.lines("heard")]
    assert len(told) == 2
    assert told[0] == told[1]
    assert 0 < int(told[0][0]) < int(told[0][1])


def test_a_strategy_around_the_modules_step_is_as_planned(job: tuple[Outcome, Path]) -> None:
    seen = count(read_trace(job[1] / "run/trace.json"))
    assert (
        seen.calls["strategy", "DDP", "training_step"].calls
        == seen.calls["module", "Net", "training_step"].calls
    )
    assert [each for each in differences_from_plan(seen.rows, seen) if "dear" not in each] == []


def test_one_rank_tells_what_the_hooks_cost(job: tuple[Outcome, Path]) -> None:
    outcome, folder = job
    assert outcome.output.count("Hooks took") == 1
    records = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    assert sum(each["type"] == "cost" for each in records) == 1
