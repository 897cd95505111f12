"""What a running job can be asked for, asked of real runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from control.asking import Asks, Counts, Steps, asked
from tiny import Net, batches, quiet

from hookline import Hook, every
from hookline.cli.runs import SavedPath
from hookline.control.client import Refused, ask
from hookline.control.commands import change_interval, job_status
from hookline.hooks import EarlyStopping, GradientMonitor, Heartbeat
from hookline.loggers import read_log

PROBE = """
from dataclasses import dataclass
from hookline import Hook

@dataclass
class Note:
    step: int

class Probe(Hook):
    heard = []
    def setup(self): self.heard.append("setup")
    def on_step_end(self, step): self.heard.append(Note(step))
    def teardown(self): self.heard.append("teardown")

class Needs(Hook):
    def __init__(self, width): ...

class Shy(Hook):
    def setup(self): raise RuntimeError("not today")

class Other: ...
"""


def of_control(run: str = "run") -> list[dict[str, Any]]:
    return [each for each in read_log(f"{run}/log.jsonl") if each["type"] == "control"]


def test_a_hook_is_switched_off_and_on_at_a_step_boundary_and_the_log_says_when() -> None:
    counts = Counts()
    answers, _ = asked(
        ("disable", {"hook": "counts"}), Steps(12), ("enable", {"hook": "counts"}), Steps(12), hooks=[counts]
    )
    off, on = answers[0]["step"], answers[2]["step"]
    assert off < on
    assert [each for each in counts.steps if off < each <= on] == []
    assert (off == 0 or off in counts.steps) and on + 1 in counts.steps
    assert [(each["command"], each["hook"], each["step"]) for each in of_control()] == [
        ("disable", "counts", off),
        ("enable", "counts", on),
    ]


def test_a_wrong_hook_is_refused_with_the_nearest_name_and_nothing_is_logged() -> None:
    answers, _ = asked(
        ("disable", {"hook": "count"}), ("disabel", {"hook": "counts"}), ("disable", {}), hooks=[Counts()]
    )
    assert all(isinstance(each, Refused) for each in answers)
    assert "no hook named 'count'. Did you mean 'counts'?" in str(answers[0])
    assert "Did you mean 'disable'?" in str(answers[1]) and "needs 'hook'" in str(answers[2])
    assert of_control() == []


class Rarely(Hook):
    def __init__(self) -> None:
        self.steps: list[int] = []

    @every("1000000 steps")
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)


def test_how_often_a_hook_is_heard_can_be_changed_whether_it_said_so_itself_or_not() -> None:
    rarely, counts, monitor = Rarely(), Counts(), GradientMonitor(log_frequency=1000)
    answers, _ = asked(
        ("every", {"hook": "rarely", "interval": "3 steps"}),
        ("every", {"hook": "counts", "interval": "7 steps"}),
        ("every", {"hook": "gradient_monitor", "interval": "5"}),
        Steps(12),
        ("status", {}),
        hooks=[rarely, counts, monitor],
    )
    assert rarely.steps and all(each % 3 == 0 for each in rarely.steps)
    later = [each for each in counts.steps if each > answers[1]["step"]]
    assert later and all(each % 7 == 0 for each in later)
    assert monitor.log_frequency == 5
    told = {each["name"]: each["every"] for each in answers[-1]["hooks"]}
    assert (told["rarely"], told["counts"], told["gradient_monitor"]) == (
        "every 3 steps",
        "every 7 steps",
        "every 5",
    )


def test_a_new_interval_counts_from_where_the_run_is() -> None:
    counts = Counts()

    class Changes(Hook):
        def on_step_end(self, trainer: Any, step: int, state: Any) -> None:
            if step == 4:
                change_interval(trainer.plan, trainer.hooks.entry("counts"), "5 steps", state)

    quiet(max_epochs=3, hooks=[counts, Changes()]).fit(Net(), batches())
    assert counts.steps == [1, 2, 3, 4, 5, 10]


def test_an_interval_that_would_mean_nothing_is_refused_with_the_reason() -> None:
    answers, _ = asked(
        ("every", {"hook": "early_stopping", "interval": "5 steps"}),
        ("every", {"hook": "heartbeat", "interval": "5 steps"}),
        ("every", {"hook": "heartbeat", "interval": "5 seconds"}),
        ("every", {"hook": "counts", "interval": "5 stps"}),
        ("every", {"hook": "counts"}),
        ("every", {"hook": "counts", "interval": "²"}),
        hooks=[EarlyStopping(monitor="train/loss"), Heartbeat(every="30 seconds"), Counts()],
    )
    texts = [str(each) for each in answers]
    assert "which do not repeat with every batch" in texts[0]
    assert "use for example '30 seconds'" in texts[1]
    assert "error" not in texts[2] and answers[2]["hook"] == "heartbeat"
    assert "unknown unit 'stps'. Did you mean 'step'?" in texts[3]
    assert "every=None" in texts[4] and "every='²'" in texts[5]


def saved_by(answer: dict[str, Any]) -> Path:
    """The checkpoint that was asked for: of that step, or, if an epoch was just beginning, of its first."""
    found = [Path(f"run/checkpoints/step-{answer['step'] + later}") for later in (0, 1)]
    return next(each for each in found if each.is_dir())


@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_checkpoint_that_was_asked_for_is_on_disk_when_the_answer_comes(save: str) -> None:
    found: list[Any] = []

    def ask_and_look() -> None:
        answer = ask("run", "checkpoint")
        found.append((answer, json.loads((Path(answer["path"]) / "manifest.json").read_text())))

    asked(ask_and_look, save=save)
    answer, manifest = found[0]
    assert (manifest["reason"], manifest["step"]) == ("manual", answer["saved_step"])
    assert answer["said"] == f"step {answer['saved_step']} is saved in {answer['path']}"


def test_a_stop_is_answered_with_the_step_that_is_on_disk() -> None:
    answers, trainer = asked(("checkpoint", {}), ("stop", {}), checkpoint=True)
    assert trainer.status == "stopped" and trainer.state.stop_reason == "requested by hookline control"
    assert answers[1]["step"] == answers[1]["saved_step"] == trainer.global_step
    assert json.loads((Path(answers[1]["path"]) / "manifest.json").read_text())["step"] == trainer.global_step
    assert (
        answers[1]["said"]
        == f"stopped at step {trainer.global_step}; its last state is saved in {answers[1]['path']}"
    )


def test_a_stop_of_a_run_that_saves_nothing_says_so() -> None:
    answers, trainer = asked(("stop", {}))
    assert (answers[0]["saved"], answers[0]["path"], answers[0]["saved_step"]) == (False, None, None)
    assert "its last state is not saved, and there is no checkpoint" in answers[0]["said"]
    assert answers[0]["step"] == trainer.global_step


def test_a_stop_that_ends_in_a_failure_says_what_is_saved() -> None:
    class Fails(Hook):
        def on_train_epoch_end(self, state: Any) -> None:
            if state.should_stop:
                raise RuntimeError("at the end")

    # a step between: a stop at the step of the checkpoint would leave nothing unsaved
    asks = Asks(lambda: ask("run", "checkpoint"), Steps(1), lambda: ask("run", "stop"))
    with pytest.raises(RuntimeError, match="at the end"):
        quiet(run_dir="run", logger=True, max_epochs=-1, hooks=[asks, Fails()]).fit(
            Net(), batches() * 50_000
        )  # one epoch
    asks.thread.join()
    path, step = asks.answers[0]["path"], asks.answers[0]["saved_step"]
    assert f"the newest checkpoint is {path} of step {step}" in str(asks.answers[2])


def test_a_checkpoint_that_cannot_be_written_is_refused_with_the_reason() -> None:
    def block_and_ask() -> Any:
        Path("run/checkpoints").write_text("a file in the way")
        return ask("run", "checkpoint")

    answers, _ = asked(block_and_ask, on_save_error="warn")
    assert isinstance(answers[0], Refused) and "could not be written" in str(answers[0])


def test_status_tells_where_the_run_is_and_what_each_hook_has_cost() -> None:
    answers, trainer = asked(Steps(12), ("status", {}), hooks=[Counts()])
    told = answers[1]
    assert (
        told["status"] == "training"
        and 0 < told["step"] <= trainer.global_step
        and told["position"].startswith("epoch ")
    )
    assert told["progress"].startswith(f"step {told['step']:,}, ")
    counts = next(each for each in told["hooks"] if each["name"] == "counts")
    assert counts["class"] == "Counts" and counts["enabled"] and counts["events"] == ["on_step_end"]
    assert (
        0 < counts["calls"] <= trainer.global_step
        and 0 < counts["worst"] <= counts["total"]
        and 0 < counts["share"] < 1
    )


def test_costs_that_are_not_measured_are_unknown_and_not_zero() -> None:
    budgeted = EarlyStopping("train/loss")
    budgeted.budget = "50%"
    answers, _ = asked(
        Steps(12), ("status", {}), hooks=[Counts(), budgeted], audit={"costs": False}, log_every_n_steps=1
    )
    hooks = {each["name"]: each for each in answers[1]["hooks"]}
    unknown = dict.fromkeys(("calls", "total", "worst", "share"))
    assert {key: hooks["counts"][key] for key in unknown} == unknown
    assert hooks["early_stopping"]["calls"] is not None  # its budget needs them


def test_a_hook_from_a_file_joins_the_run_with_its_set_up_and_gets_its_teardown() -> None:
    Path("probe.py").write_text(PROBE)
    file = str(Path("probe.py").resolve())
    answers, trainer = asked(
        ("attach", {"file": f"{file}:Probe"}),
        ("attach", {"file": f"{file}:Probe", "name": "second"}),
        Steps(12),
    )
    assert [each["hook"] for each in answers[:2]] == ["probe", "second"]
    heard = trainer.hooks["probe"].heard
    assert heard[0] == "setup" and heard[-1] == "teardown" and heard[1].step == answers[0]["step"] + 1
    assert of_control()[0] == {
        **of_control()[0],
        "file": file,
        "class": "Probe",
        "sha256": answers[0]["sha256"],
    }


def test_a_file_that_is_attached_again_takes_the_place_of_what_it_was() -> None:
    Path("probe.py").write_text(PROBE)
    heard: list[Any] = []

    def attach(name: str | None = None) -> str:
        answer = ask("run", "attach", file=f"{Path('probe.py').resolve()}:Probe", name=name)
        heard.append(heard_by_probe())
        return str(answer["hook"])

    answers, trainer = asked(
        attach, Steps(12), attach, lambda: attach("mine"), lambda: attach("mine"), Steps(12)
    )
    assert [answers[index] for index in (0, 2, 3, 4)] == ["probe", "probe", "mine", "mine"]
    assert trainer.hooks.list_hooks() == ["asks", "probe", "mine"]
    for each in heard:
        assert (
            each[0] == "setup"
            and each[-1] == "teardown"
            and each.count("setup") == each.count("teardown") == 1
        )
    last = [each[-2].step if len(each) > 2 else 0 for each in heard]
    assert (
        last[0] < last[1] == trainer.global_step == last[3] > last[2]
    )  # what was replaced heard no more steps


def test_one_that_cannot_take_its_place_leaves_it_there() -> None:
    Path("probe.py").write_text(PROBE)
    file = str(Path("probe.py").resolve())

    def shy() -> Any:
        Path("probe.py").write_text(
            PROBE.replace('self.heard.append("setup")', "raise RuntimeError('not today')")
        )
        return ask("run", "attach", file=f"{file}:Probe")

    answers, trainer = asked(("attach", {"file": f"{file}:Probe"}), shy, Steps(12))
    assert "RuntimeError: not today" in str(answers[1])
    assert trainer.hooks.list_hooks() == ["asks", "probe"]
    steps = [each.step for each in trainer.hooks["probe"].heard if not isinstance(each, str)]
    assert steps and steps[-1] == trainer.global_step


def test_what_was_attached_can_be_detached_and_nothing_else() -> None:
    Path("probe.py").write_text(PROBE)
    file = str(Path("probe.py").resolve())
    heard: list[Any] = []
    answers, trainer = asked(
        ("detach", {"hook": "counts"}),
        ("attach", {"file": f"{file}:Probe"}),
        ("detach", {"hook": "prob"}),
        lambda: heard.append(heard_by_probe()),
        ("detach", {"hook": "probe"}),
        ("detach", {"hook": "probe"}),
        hooks=[Counts()],
    )
    assert "was not attached from outside; use disable to switch it off. Attached: none." in str(answers[0])
    assert "Did you mean 'probe'?" in str(answers[2]) and "There is no hook named 'probe'" in str(answers[5])
    assert answers[4] == {**answers[4], "command": "detach", "hook": "probe"}
    assert trainer.hooks.list_hooks() == ["counts", "asks"]
    assert heard[0][0] == "setup" and heard[0][-1] == "teardown" and heard[0].count("teardown") == 1
    assert [each["command"] for each in of_control()] == ["attach", "detach"]


def heard_by_probe() -> Any:
    """What the probe that was attached last has heard."""
    attached = [name for name in sys.modules if name.startswith("hookline_attached_")]
    return sys.modules[max(attached, key=lambda name: int(name.split("_")[2]))].Probe.heard


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("probe.py:Prob", "has no hook 'Prob'. Did you mean 'Probe'?"),
        ("probe.py:Other", "Other in probe.py does not derive from hookline.Hook"),
        ("probe.py:Needs", "cannot be created without arguments"),
        ("probe.py:Shy", "RuntimeError: not today"),
        ("probe.py", "several hooks; name one: probe.py:Probe"),
        ("prob.py:Probe", "Did you mean 'probe.py'?"),
        ("torn.py:Probe", "SyntaxError"),
        ("loud.py:Probe", "ZeroDivisionError"),
        ("script.py:Probe", "SystemExit: 2"),
        ("none.py:Probe", "has no class that derives from hookline.Hook"),
        ("probe.txt:Probe", "such as probe.py:Probe"),
    ],
)
def test_a_file_that_cannot_be_attached_is_refused_and_leaves_the_run_as_it_was(file: str, said: str) -> None:
    Path("probe.py").write_text(PROBE)
    Path("torn.py").write_text("class Probe(")
    Path("loud.py").write_text("1 / 0")
    Path("none.py").write_text("import os")
    Path("script.py").write_text("import sys\nsys.exit(2)")  # as argparse does in a script
    answers, trainer = asked(("attach", {"file": str(Path(file).resolve())}))
    assert isinstance(answers[0], Refused) and said in str(answers[0])
    assert trainer.status == "stopped" and trainer.hooks.list_hooks() == ["asks"]


def test_a_pipe_is_not_waited_for_and_a_name_that_no_table_can_show_is_refused() -> None:
    Path("probe.py").write_text(f"{PROBE}\nclass Wide(Hook):\n    name = 'x' * 5000\n")
    os.mkfifo("pipe.py")
    answers, trainer = asked(
        ("attach", {"file": "pipe.py:Probe"}),
        *[("attach", {"file": "probe.py:Probe", "name": name}) for name in ("a\nb", "x" * 5000, 3)],
        ("attach", {"file": "probe.py:Wide"}),
    )
    assert "pipe.py is not a regular file" in str(answers[0])
    assert all(
        "must be one line of text with at most 200 characters" in str(each) and len(str(each)) < 400
        for each in answers[1:]
    )
    assert [type(each).__name__ for each in trainer.hooks] == ["Asks"]


def test_a_name_that_is_taken_cannot_be_given_to_a_file() -> None:
    Path("probe.py").write_text(PROBE)
    answers, _ = asked(
        ("attach", {"file": str(Path("probe.py").resolve()) + ":Probe", "name": "counts"}), hooks=[Counts()]
    )
    assert "is the name of a hook of the program" in str(answers[0])


def test_a_run_that_was_changed_from_outside_resumes_as_it_was_written_down() -> None:
    Path("probe.py").write_text(PROBE)
    rarely = Rarely()
    answers, _ = asked(
        ("every", {"hook": "rarely", "interval": "3 steps"}),
        ("attach", {"file": str(Path("probe.py").resolve()) + ":Probe"}),
        ("disable", {"hook": "counts"}),
        ("checkpoint", {}),
        hooks=[rarely, Counts()],
    )
    again, counts = Rarely(), Counts()
    saved = saved_by(answers[3])
    trainer = quiet(
        run_dir="run",
        logger=True,
        max_epochs=-1,
        max_steps=int(saved.name.removeprefix("step-")) + 8,
        hooks=[again, counts],
    )
    trainer.fit(Net(), batches(), resume=saved)
    assert len(counts.steps) == 8 and again.steps == [] and "probe" not in trainer.hooks


def test_the_status_does_not_list_the_hook_of_the_command_line() -> None:
    class Reads(Hook):
        def on_train_start(self, trainer: Any) -> None:
            self.names = [each["name"] for each in job_status(trainer._run)["hooks"]]

    reads = Reads()
    quiet(hooks=[reads, SavedPath()]).fit(Net(), batches(1))
    assert reads.names == ["reads"]
