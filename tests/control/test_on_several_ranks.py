"""What rank zero is asked for, all ranks do at the same step, or none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks.torchrun import Outcome, torchrun

from hookline.loggers import read_log

SCRIPT = """
import json, os, threading, time
from pathlib import Path
from tiny import Net, batches, quiet
from hookline import Hook
from hookline.control.client import ask
from hookline.util.errors import HooklineError

Path("good.py").write_text("from hookline import Hook\\nclass Good(Hook):\\n    def on_step_end(self): ...\\n")
Path("uneven.py").write_text("import os\\nfrom hookline import Hook\\nassert os.environ['RANK'] == '0', 'not here'\\nclass Uneven(Hook): ...\\n")
Path("shy.py").write_text("import os\\nfrom hookline import Hook\\nclass Shy(Hook):\\n    def setup(self): assert os.environ['RANK'] == '0', 'shy'\\n")
answers = []

def attempt(command, **given):
    try:
        answers.append(ask("run", command, **given))
    except HooklineError as error:
        answers.append(str(error))

def ask_it_all():
    attempt("disable", hook="counts")
    attempt("attach", file=os.path.abspath("uneven.py"))
    attempt("attach", file=os.path.abspath("shy.py"))
    attempt("attach", file=os.path.abspath("good.py"))
    attempt("attach", file=os.path.abspath("good.py"))
    Path("good.py").write_text("from hookline import Hook\\nclass Good(Hook):\\n    def setup(self, rank): assert rank == 0, 'shy'\\n")
    attempt("attach", file=os.path.abspath("good.py"))
    Path("gone.py").write_text("from hookline import Hook\\nclass Gone(Hook):\\n    def on_step_end(self): ...\\n")
    attempt("attach", file=os.path.abspath("gone.py"))
    attempt("detach", hook="gone")
    attempt("every", hook="good", interval="3 steps")
    attempt("validate")
    attempt("lr", value="x0.5")
    end = time.monotonic() + 120
    while not any(rate != 0.1 for _, rate in validated.rates) and time.monotonic() < end:
        time.sleep(0.01)  # an update must be made with the new rate before the run is asked to stop
    attempt("lr", value="nothing")
    attempt("checkpoint")
    attempt("stop")

class Counts(Hook):
    last = 0
    def on_step_end(self, step):
        self.last = step

class Validated(Hook):
    def __init__(self):
        self.steps, self.rates = [], []
    def on_validation_end(self, step, metrics):
        self.steps.append([step, {name: value for name, value in metrics.items() if name.startswith("val")}])
    def on_before_optimizer_step(self, step, optimizer):
        self.rates.append([step, optimizer.param_groups[0]["lr"]])

class Starts(Hook):
    def on_train_start(self, rank):
        assert Path("run/control.sock").exists() or rank
        if rank == 0:
            self.thread = threading.Thread(target=ask_it_all, daemon=True)
            self.thread.start()

counts, starts, validated = Counts(), Starts(), Validated()
trainer = quiet(run_dir="run", logger=True, max_epochs=-1, max_time="2 minutes", hooks=[counts, starts, validated], checkpoint=True,
                check_val_every_n_epoch=10**6)
trainer.fit(Net(), batches(16), batches(3))
if trainer.strategy.rank == 0:
    starts.thread.join(30)  # a request to stop is answered when the run has ended
about = {"rank": trainer.strategy.rank, "last": counts.last, "hooks": trainer.hooks.list_hooks(), "step": trainer.global_step,
         "status": trainer.status, "reason": trainer.state.stop_reason, "answers": answers,
         "validated": validated.steps, "rates": [each for each in validated.rates if each[1] != 0.1][:1]}
print("SAID", json.dumps(about), flush=True)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return torchrun(SCRIPT, folder, deadline=300), folder


def told(outcome: tuple[Outcome, Path]) -> list[dict[str, object]]:
    assert outcome[0].code == 0, outcome[0].output
    return sorted((json.loads(each) for each in outcome[0].lines("SAID")), key=lambda each: each["rank"])


def test_every_rank_has_the_same_hooks_and_stops_at_the_same_step(outcome: tuple[Outcome, Path]) -> None:
    first, second = told(outcome)
    assert (first["rank"], second["rank"]) == (0, 1)
    for key in ("last", "hooks", "step", "status", "reason"):
        assert first[key] == second[key], key
    assert first["hooks"] == ["starts", "validated", "good"] and first["status"] == "stopped"


def test_a_file_that_one_rank_cannot_load_is_attached_nowhere(outcome: tuple[Outcome, Path]) -> None:
    answers = told(outcome)[0]["answers"]
    assert isinstance(answers, list) and "on rank 1: AssertionError: not here" in answers[1]
    assert "on rank 1: AssertionError: shy" in answers[2]  # nor one that it cannot set up
    assert answers[3]["hook"] == answers[4]["hook"] == "good" and answers[13]["command"] == "stop"
    assert "on rank 1: AssertionError: shy" in answers[5]  # what it was to replace is still there


def test_what_was_attached_is_detached_on_every_rank(outcome: tuple[Outcome, Path]) -> None:
    answers = told(outcome)[0]["answers"]
    assert isinstance(answers, list)
    assert (answers[6]["hook"], answers[7]["hook"], answers[7]["command"]) == ("gone", "gone", "detach")


def test_all_ranks_validate_at_the_same_step_and_the_answer_has_their_common_metrics(
    outcome: tuple[Outcome, Path],
) -> None:
    first, second = told(outcome)
    answer = first["answers"][9]  # type: ignore[index]
    assert first["validated"] == second["validated"] == [[answer["step"], answer["metrics"]]]
    assert list(answer["metrics"]) == ["val/loss"]


def test_all_ranks_update_with_the_new_rate_from_the_same_step_on(outcome: tuple[Outcome, Path]) -> None:
    first, second = told(outcome)
    answer, refused = first["answers"][10:12]  # type: ignore[index]
    assert answer["groups"] == [{"group": 0, "name": None, "before": 0.1, "lr": 0.05}]
    assert first["rates"] == second["rates"] == [[answer["step"], 0.05]]
    assert "lr 'nothing'" in refused


def test_the_answers_say_which_steps_are_on_disk(outcome: tuple[Outcome, Path]) -> None:
    first = told(outcome)[0]
    checkpoint, stop = first["answers"][-2:]  # type: ignore[index]
    assert (stop["step"], stop["saved_step"], stop["saved"]) == (first["step"], first["step"], True)
    for answer in (checkpoint, stop):
        assert (
            json.loads((Path(answer["path"]) / "manifest.json").read_text())["step"] == answer["saved_step"]
        )


def test_it_is_logged_once(outcome: tuple[Outcome, Path]) -> None:
    commands = [each["command"] for each in read_log(outcome[1] / "run") if each["type"] == "control"]
    assert commands == ["disable", *["attach"] * 6, "detach", "every", "validate", "lr", "checkpoint", "stop"]
