"""What one rank wants is done by all, at the same batch, soon after; and no rank hangs when ranks want different things."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ranks.torchrun import torchrun

SCRIPT = '''
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
from tiny import Net, batches, quiet
from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, Hook, HooklineError, Signal, on
from hookline.training.ranks import rank_sync
from hookline.run.commands import handles_command

FOLDER = sys.argv[1]


class Saved(Hook):
    def setup(self):
        self.told = []

    def on_checkpoint_save(self, path, step, reason):
        self.told.append([Path(path).name, step, reason])


class Weights(Hook):
    """The sum of all weights at the end: ranks that did something different no longer agree on it."""

    def on_train_end(self, module):
        self.sum = sum(float(each.sum()) for each in module.parameters())


def run(name, *hooks, data=24, **options):
    saved, weights = Saved(), Weights()
    trainer = quiet(hooks=[*hooks, saved, weights], default_root_dir=FOLDER, seed=1, **options)
    error = None
    try:
        trainer.fit(Net(), batches(data))
    except HooklineError as caught:
        error = str(caught)
    s = trainer.state
    facts = dict(rank=s.rank, step=s.step, batches=s.batches_seen, epochs=s.epochs_seen, status=s.status, reason=s.stop_reason,
                 saved=saved.told, weights=getattr(weights, "sum", None), error=error)
    facts |= {key: value for hook in hooks for key, value in vars(hook).items() if key.startswith("seen")}
    sys.stdout.write(f"RESULT {json.dumps([name, facts])}\\n")
    sys.stdout.flush()


class At(Hook):
    """Does something once, on one rank, after a batch."""

    def __init__(self, rank, batch, action):
        self.on_rank, self.at, self.action = rank, batch, action

    def on_train_batch_end(self, trainer, rank, batch_idx):
        if rank == self.on_rank and batch_idx == self.at:
            self.action(trainer)


run("stop", At(1, 2, lambda trainer: trainer.stop("enough")))


class StopsWhenTheEpochEnds(Hook):
    def on_train_epoch_end(self, trainer, rank):
        if rank == 1:
            trainer.should_stop = True


run("stop at the epoch's end", StopsWhenTheEpochEnds(), data=4, max_epochs=3)


class AsksForOne(Hook):
    ranks = "zero"

    def on_step_end(self, trainer, step):
        if step == 3:
            trainer.save_checkpoint(reason="interval")


run("save on rank zero", AsksForOne())


class AllAsk(Hook):
    def on_step_end(self, trainer, step):
        if step in (3, 5):
            trainer.save_checkpoint()

    def on_train_end(self, trainer, rank):
        if rank == 1:
            trainer.save_checkpoint(reason="last")


run("save everywhere", AllAsk())


class EachItsOwn(Hook):
    def on_step_end(self, trainer, step, rank):
        if step == 2:
            trainer.save_checkpoint(Path(FOLDER) / f"wanted-by-{rank}")


run("save under different names", EachItsOwn())


class EndsEpoch(Hook):
    def on_train_batch_start(self, rank, batch_idx) -> Signal | None:
        return END_EPOCH if rank == 1 and batch_idx == 3 else None


run("end of an epoch", EndsEpoch(), max_epochs=2)


class SkipsBatch(Hook):
    steers = True

    def on_train_batch_start(self, rank, batch_idx):
        return SKIP_BATCH if rank == 0 and batch_idx == 1 else None


run("skipped batch", SkipsBatch())


class SkipsStep(Hook):
    ranks = "zero"
    steers = {"before_optimizer_step"}

    def on_before_optimizer_step(self, batch_idx):
        return SKIP_STEP if batch_idx == 3 else None


run("skipped step", SkipsStep(), data=12)


class UpdatesByHand(Hook):
    steers = True

    def on_before_optimizer_step(self, rank, optimizer):
        if rank == 1:
            optimizer.step()
            return STEP_DONE


run("step done on one rank", UpdatesByHand())


def ends_epoch(batch_idx) -> "Signal | None":
    return END_EPOCH if batch_idx == 3 else None


run("function", on("train_batch_start")(ends_epoch))


class Slow(Hook):
    """By clocks that are turned by hand, one rank takes twice as long as the other."""

    def __init__(self):
        self.seen_at, self.now = [], 0.0
        rank_sync.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: self.now})

    def on_train_batch_start(self, rank):
        self.now += 0.02 * (rank + 1)

    def teardown(self):
        rank_sync.time = time

    @on("train_batch_end", every="0.1 seconds")
    def note(self, batches_seen):
        self.seen_at.append(batches_seen)


run("time", Slow(), max_time=0.8, max_epochs=None)


@handles_command("note")
def note(run, sender, word):
    run.state.hooks["sends"].seen_errands.append([sender, word, run.state.batches_seen])


class Sends(Hook):
    def __init__(self):
        self.seen_errands = []

    def on_train_batch_end(self, trainer, rank, batch_idx):
        if batch_idx == 2:
            trainer._run.participants.commands.send("note", word=f"from {rank}")
        if batch_idx == 6 and rank == 1:
            trainer._run.participants.commands.send("note", word="alone")


run("commands", Sends())
run("out of step", At(1, 3, lambda trainer: trainer.state.fill(batch_idx=99)))
'''


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By the name of a run: what each rank saw of it."""
    folder = tmp_path_factory.mktemp("agreement")
    outcome = torchrun(SCRIPT, folder, str(folder), deadline=300)
    assert outcome.code == 0, outcome.output
    found: dict[str, list[dict[str, Any]]] = {}
    for line in outcome.lines("RESULT"):
        name, facts = json.loads(line)
        found.setdefault(name, []).append(facts)
    return {name: sorted(facts, key=lambda each: each["rank"]) for name, facts in found.items()}


def same(facts: list[dict[str, Any]], *names: str) -> dict[str, Any]:
    """What both ranks saw alike."""
    assert len(facts) == 2
    for name in (*names, "step", "epochs", "status", "reason", "weights", "saved"):
        assert facts[0][name] == facts[1][name], name
    return facts[0]


def test_a_stop_asked_for_by_one_rank_ends_all_within_two_steps(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    seen = same(results["stop"])
    assert seen["status"] == "stopped"
    assert 3 < seen["step"] <= 5  # asked for after the third
    assert seen["reason"] == "enough (asked for by rank 1)"


def test_a_stop_asked_for_when_an_epoch_ends_comes_before_the_next(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    assert same(results["stop at the epoch's end"])["epochs"] == 1


def test_a_checkpoint_that_only_rank_zero_wants_is_written_by_all_one_batch_later(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    assert same(results["save on rank zero"])["saved"] == [["step-4", 4, "interval"]]


def test_a_checkpoint_that_all_ranks_want_is_of_the_very_step(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    told = same(results["save everywhere"])["saved"]
    assert told[:2] == [["step-3", 3, "manual"], ["step-5", 5, "manual"]]
    assert [reason for _, _, reason in told[2:]] == ["last"]  # asked for by one rank at the end


def test_ranks_that_want_different_checkpoints_write_both(results: dict[str, list[dict[str, Any]]]) -> None:
    told = same(results["save under different names"])["saved"]
    assert [(name, step) for name, step, _ in told] == [("wanted-by-0", 2), ("wanted-by-1", 2)]


def test_an_epoch_that_one_rank_ends_is_over_for_all(results: dict[str, list[dict[str, Any]]]) -> None:
    seen = same(results["end of an epoch"])
    assert (seen["epochs"], seen["step"]) == (2, 6)


def test_a_batch_that_one_rank_skips_leaves_the_weights_the_same(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    seen = same(results["skipped batch"])
    zero, one = results["skipped batch"]
    assert zero["batches"] == one["batches"] - 1
    assert seen["status"] == "completed"


def test_an_update_that_a_hook_on_rank_zero_skips_is_skipped_by_all(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    seen = same(results["skipped step"])
    assert seen["step"] == seen["batches"] - 1


def test_an_update_made_by_hand_on_one_rank_only_is_an_error_that_names_it(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for each in results["step done on one rank"]:
        assert "STEP_DONE" in each["error"] and "None on rank 0, STEP_DONE on rank 1" in each["error"]


def test_a_function_declares_by_its_return_annotation(results: dict[str, list[dict[str, Any]]]) -> None:
    assert same(results["function"])["step"] == 3


def test_time_is_over_for_all_ranks_at_the_same_batch(results: dict[str, list[dict[str, Any]]]) -> None:
    seen = same(results["time"], "batches", "seen_at")
    assert "max_time" in seen["reason"]
    assert 5 <= len(seen["seen_at"]) <= 8  # `every="0.1 seconds"` of 0.8, at the same batches everywhere


def test_errands_are_carried_out_by_all_at_the_same_batch_in_the_order_of_ranks(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    seen = same(results["commands"], "seen_errands")["seen_errands"]
    assert [(sender, word) for sender, word, _ in seen] == [(0, "from 0"), (1, "from 1"), (1, "alone")]
    assert seen[0][2] == seen[1][2] and 3 < seen[0][2] <= 5 and 7 < seen[2][2] <= 9


def test_ranks_that_are_not_at_the_same_batch_are_told_so_instead_of_waiting_for_ever(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for each in results["out of step"]:
        assert "out of step: one is after batch 4 of its epoch, another after batch 100" in each["error"]
