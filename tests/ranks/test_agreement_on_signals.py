"""A signal that one rank hears, or all of them, ends the run in good order on every rank: one checkpoint, the same one."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from ranks.torchrun import torchrun

SCRIPT = '''
import json, logging, os, signal, sys, time
from pathlib import Path
from tiny import Net, batches, quiet
from hookline import Hook, Preempted
from hookline.hooks import EarlyStopping

FOLDER = sys.argv[1]


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


class Diary(Hook):
    def __init__(self):
        self.told = []

    def on_checkpoint_save(self, path, step, reason):
        self.told.append([Path(path).name, step, reason])

    def on_validation_abandoned(self, batch_idx):
        self.told.append("validation abandoned")

    def on_validation_end(self):
        self.told.append("validation ended")

    def on_train_end(self, status):
        self.told.append(status)

    def on_exception(self, exception):
        self.told.append(type(exception).__name__)

    def teardown(self):
        self.told.append("teardown")


class Killed(Hook):
    def __init__(self, number, ranks, batch=2):
        self.number, self.of, self.at = number, ranks, batch

    def on_train_batch_end(self, rank, batch_idx):
        if rank in self.of and batch_idx == self.at:
            os.kill(os.getpid(), self.number)


class KilledTwice(Killed):
    """As by a scheduler that reaches torchrun and its ranks at the same time."""

    def on_train_batch_end(self, rank, batch_idx):
        super().on_train_batch_end(rank, batch_idx)
        super().on_train_batch_end(rank, batch_idx)


class Stuck(Killed):
    def on_train_batch_end(self, rank, batch_idx):
        super().on_train_batch_end(rank, batch_idx)
        if rank in self.of and batch_idx == self.at:
            time.sleep(60)


class KilledInValidation(Killed):
    def on_train_batch_end(self):
        pass

    def on_validation_batch_end(self, rank, batch_idx):
        if rank in self.of and batch_idx == self.at:
            os.kill(os.getpid(), self.number)
        time.sleep(0.01)


def run(name, hook, val=None, data=40, run_dir=None, resume=None, more=(), **options):
    diary, ended = Diary(), "returned"
    trainer = quiet(hooks=[*([hook] if hook else []), diary, *more], run_dir=run_dir, default_root_dir=FOLDER, **options)
    try:
        trainer.fit(Net(), batches(data), val, resume=resume)
    except (Preempted, KeyboardInterrupt) as caught:
        ended = [type(caught).__name__, getattr(caught, "code", None)]
    except Exception as caught:
        ended = [type(caught).__name__, None]
    s = trainer.state
    facts = dict(rank=s.rank, step=s.step, status=s.status, reason=s.stop_reason, told=diary.told, ended=ended)
    sys.stdout.write(f"RESULT {json.dumps([name, facts])}\\n")
    sys.stdout.flush()


run("SIGTERM on one rank", Killed(signal.SIGTERM, {1}))
run("SIGUSR1 on all ranks", Killed(signal.SIGUSR1, {0, 1}))
run("SIGINT on one rank", Killed(signal.SIGINT, {0}))
run("when the last batch is over", Killed(signal.SIGTERM, {1}, batch=19))
run("in a validation", KilledInValidation(signal.SIGTERM, {1}), val=batches(1000), val_check_interval=3, run_dir=f"{FOLDER}/cut")
run("resumed", None, val=batches(4), data=10, val_check_interval=3, run_dir=f"{FOLDER}/cut", resume="auto")
warned = Warnings()
logging.getLogger("hookline").addHandler(warned)
run("before a check", Killed(signal.SIGTERM, {1}), val=batches(2), more=[EarlyStopping("val/loss")])
said = [each for each in warned.said if "EarlyStopping" in each]
sys.stdout.write(f"RESULT {json.dumps(['warnings', said])}\\n")
run("twice", KilledTwice(signal.SIGTERM, {0, 1}))
run("stuck", Stuck(signal.SIGTERM, {1}), grace_period=1)  # no rank can continue after it
'''


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By the name of a run: what each rank saw of it."""
    folder = tmp_path_factory.mktemp("signals")
    outcome = torchrun(SCRIPT, folder, str(folder), deadline=300)
    assert outcome.code == 0, outcome.output
    # of the signal that both ranks get, one speaks, and of that which only rank 1 gets as well
    assert outcome.output.count("SIGUSR1: finishing this batch") == 1, outcome.output
    assert "[rank 0] SIGTERM of another rank: saving, then the run ends." in outcome.output
    found: dict[str, list[dict[str, Any]]] = {}
    for line in outcome.lines("RESULT"):
        name, facts = json.loads(line)
        found.setdefault(name, []).append(facts)
    return found


def same(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What both ranks saw, which must be the same."""
    assert [each.pop("rank") for each in sorted(facts, key=lambda each: each["rank"])] == [0, 1]
    assert facts[0] == facts[1]
    return facts[0]


def test_a_signal_to_one_rank_saves_once_and_ends_all(results: dict[str, list[dict[str, Any]]]) -> None:
    seen = same(results["SIGTERM on one rank"])
    assert 3 < seen["step"] <= 5  # heard in the third
    assert seen["told"] == [[f"step-{seen['step']}", seen["step"], "signal"], "preempted", "teardown"]
    assert seen["ended"] == ["Preempted", 128 + signal.SIGTERM]
    assert seen["reason"] == "SIGTERM"


def test_that_a_metric_was_never_checked_is_said_by_one_rank(results: dict[str, list[Any]]) -> None:
    assert same(results["before a check"])["status"] == "preempted"
    never = "EarlyStopping never checked 'val/loss': the run ended before a check was due."
    assert sorted(results["warnings"]) == [[], [f"[rank 0] {never}"]]


def test_a_signal_to_all_ranks_is_one_signal(results: dict[str, list[dict[str, Any]]]) -> None:
    seen = same(results["SIGUSR1 on all ranks"])
    assert [each for each in seen["told"] if each[-1] == "signal"] == [
        [f"step-{seen['step']}", seen["step"], "signal"]
    ]
    assert seen["ended"] == ["Preempted", 128 + signal.SIGUSR1]


def test_a_signal_that_the_launcher_passes_on_is_no_second_one(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    seen = same(results["twice"])
    assert seen["told"] == [[f"step-{seen['step']}", seen["step"], "signal"], "preempted", "teardown"]


def test_a_grace_period_ends_a_rank_that_is_stuck_however_short_it_is(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    (stuck,) = [each for each in results["stuck"] if each["rank"] == 1]
    assert stuck["ended"] == ["Preempted", 128 + signal.SIGTERM] and "teardown" in stuck["told"]


def test_ctrl_c_goes_through_on_exception_on_every_rank(results: dict[str, list[dict[str, Any]]]) -> None:
    seen = same(results["SIGINT on one rank"])
    assert seen["told"] == [
        [f"step-{seen['step']}", seen["step"], "signal"],
        "interrupted",
        "KeyboardInterrupt",
        "teardown",
    ]
    assert seen["ended"] == ["KeyboardInterrupt", None]
    assert seen["status"] == "interrupted"


def test_a_signal_in_the_last_batch_is_heeded_before_the_epoch_ends(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    seen = same(results["when the last batch is over"])
    assert seen["status"] == "preempted"
    assert ["step-20", 20, "signal"] in seen["told"]


def test_a_validation_is_given_up_by_all_and_done_again_after_the_resume(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    cut = same(results["in a validation"])
    assert cut["told"] == ["validation abandoned", ["step-3", 3, "signal"], "preempted", "teardown"]
    resumed = same(results["resumed"])
    assert resumed["told"][0] == "validation ended"
    assert resumed["status"] == "completed"
