"""HealthCheck: a slow rank and a silent one are named; one process has no other rank to ask."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks.torchrun import Outcome, torchrun
from tiny import Net, batches, quiet

from hookline import OptionError
from hookline.cli import main
from hookline.hooks import HealthCheck
from hookline.report.reader import read_run
from hookline.report.run_events import all_events
from hookline.report.summary import summarize

SCRIPT = '''
import json, logging, sys, time
from pathlib import Path
from tiny import Net, batches, quiet
from hookline import Hook
from hookline.hooks import HealthCheck


class Sleeps(Hook):
    """One rank is slow in every batch, by a clock that is turned by hand; later it is silent until it was named, or for good."""

    now = 0.0

    def __init__(self, batch=0, silent=None, rate=0, only=range(99)):
        self.batch, self.silent, self.rate, self.only = batch, silent, rate, only

    def on_train_batch_start(self, rank, batch_idx):
        Sleeps.now += self.batch * rank * (batch_idx in self.only)

    def on_step_end(self, rank, step, optimizers):
        if step == 4:
            optimizers[0].param_groups[0]["lr"] += self.rate * rank
        while rank == 1 and step == 4 and self.silent is not None and not self.silent.exists():
            time.sleep(0.05)


def note(record):
    if "no answer at step 4" in record.getMessage():
        Path("named").touch()
    return True


logging.getLogger("hookline").addFilter(note)
for each in (HealthCheck.on_train_batch_end, HealthCheck.on_before_backward, HealthCheck.on_step_end):
    each.__defaults__ = (lambda: Sleeps.now,)


class Waits(HealthCheck):
    """The wait of rank zero takes a second, by the clock."""

    def _wait(self, answer, step):
        super()._wait(answer, step)
        Sleeps.now += self._ranks.rank == 0


def run(name, sleeps, check=HealthCheck, every=4, **options):
    check = check(every_n_steps=every, **options)
    quiet(hooks=[sleeps, check], run_dir=f"runs/{name}", logger=True).fit(Net(), batches(16))
    sys.stdout.write(f"RESULT {json.dumps([name, check.slow, len(check.seconds)])}\\n")
    sys.stdout.flush()


run("even", Sleeps())
run("noise", Sleeps(batch=0.008), every=1)
run("once", Sleeps(batch=0.03, only=(3, 7)), every=1)
run("slow", Sleeps(batch=0.03), every=1)
run("waits", Sleeps(), Waits, every=1)
run("rates", Sleeps(rate=0.5), every=1)
run("silent", Sleeps(silent=Path("named")), patience=0.5)
run("gone", Sleeps(silent=Path("nothing")), patience=0.5, action="raise")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("health")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome:
    """Two ranks: they are even, one is slow, one is silent for a while, and one does not come back."""
    return torchrun(SCRIPT, folder, deadline=300)


@pytest.mark.usefixtures("outcome")
@pytest.mark.parametrize(
    ("name", "steps", "text"),
    [
        ("even", [], ""),
        ("slow", [2, 3, 5], "HealthCheck: slow at step 5 and at the check before: rank 1 ("),
        ("rates", [4, 5, 7], "HealthCheck: the learning rates of the ranks differ at step 7, so"),
        ("silent", [4], "HealthCheck: no answer at step 4 for"),
    ],
)
def test_what_it_reports_is_in_the_log_the_summary_and_the_report_of_the_run(
    folder: Path, name: str, steps: list[int], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = folder / "runs" / name
    (about,) = summarize([run_dir])["runs"]
    # a silent rank is reported again each time the patience ends
    assert sorted({each["step"] for each in about["warnings"]}) == steps
    assert main(["summary", str(run_dir)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  warning")]
    assert [text in line for line in lines] == [True] * bool(steps)
    assert ("(3 similar ones; --json has them)" in "".join(lines)) == (len(steps) == 3)
    shown = [each for each in all_events(read_run(run_dir)) if each.kind == "warning"]
    assert (shown[-1].text if shown else "").startswith(text)


def test_a_slow_rank_is_named_on_rank_zero_and_known_to_all(outcome: Outcome) -> None:
    assert [json.loads(each) for each in outcome.lines("RESULT")][:2] == [["even", [], 2]] * 2
    assert outcome.lines("RESULT").count('["slow", [1], 2]') == 2, outcome.output
    named = re.findall(
        r"^\[rank (\d)\] HealthCheck: slow at step (\d) and at the check before: rank 1 \(.+?\): ([\d.]+) ms of its own "
        r"per step; the time of the other rank is 0\.0 ms$",
        outcome.output,
        re.MULTILINE,
    )
    assert named == [("0", "2", "30.0"), ("0", "3", "30.0"), ("0", "5", "30.0")]
    assert outcome.output.count("HealthCheck: slow") == 3


def test_noise_and_one_slow_step_are_not_reported(outcome: Outcome) -> None:
    assert outcome.lines("RESULT").count('["noise", [], 2]') == 2, outcome.output
    assert outcome.lines("RESULT").count('["once", [1], 2]') == 2, outcome.output  # known, and not reported


def test_the_wait_of_a_check_is_not_the_rank_s_own_time(outcome: Outcome) -> None:
    assert outcome.lines("RESULT").count('["waits", [], 2]') == 2, outcome.output


def test_ranks_with_different_learning_rates_are_named(outcome: Outcome) -> None:
    named = re.findall(
        r"^\[rank (\d)\] HealthCheck: the learning rates of the ranks differ at step (\d), .*: rank 0 \(.+?\): "
        r"([\d.]+), rank 1 \(.+?\): ([\d.]+) \(the sum",
        outcome.output,
        re.MULTILINE,
    )
    assert named == [("0", step, "0.1", "0.6") for step in "457"], outcome.output


def test_a_silent_rank_is_named_and_waited_for(outcome: Outcome) -> None:
    assert re.search(
        r"^\[rank 0\] HealthCheck: no answer at step 4 for [\d.]+ s from rank 1 \(",
        outcome.output,
        re.MULTILINE,
    )
    assert outcome.lines("RESULT").count('["silent", [], 2]') == 2


def test_a_rank_that_stays_silent_ends_the_job_if_told_to(outcome: Outcome) -> None:
    assert outcome.code != 0
    assert not any('"gone"' in each for each in outcome.lines("RESULT"))
    failed = r"Rank 0 has failed: PeerError: HealthCheck: no answer at step 4 for .* from rank 1 .*hook 'health_check' in on_step_end"
    assert re.search(rf"^\[rank 1\] {failed}", outcome.output, re.MULTILINE), outcome.output


def test_on_one_process_it_does_nothing() -> None:
    check = HealthCheck(every_n_steps=1)
    quiet(hooks=[check]).fit(Net(), batches(2))
    assert (check.seconds, check.slow) == ([], [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0 must be a whole number"),
        ({"slower": 1}, "slower=1 must be a number above 1"),
        ({"action": "rais"}, "Did you mean 'raise'?"),
        ({"patience": "soon"}, "patience='soon': use seconds"),
        ({"patience": None}, "patience=None: use seconds"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_written(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        HealthCheck(**given)


def test_it_cannot_be_limited_to_some_ranks() -> None:
    check = HealthCheck(patience=timedelta(minutes=2))
    assert check.patience == 120
    check.ranks = "zero"
    with pytest.raises(OptionError, match="it needs all ranks"):
        quiet(hooks=[check]).fit(Net(), batches(2))
