"""`hookline mcp`: tasks that an assistant solves from JSON alone, and what it may not do.

One server, a few recorded runs and one running job are shared by all tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cli.assistant import Assistant, assistant
from cli.configured import PARTS
from report.reported import metrics, written
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.cli import main
from hookline.cli.mcp_folder import ServedFolder
from hookline.cli.mcp_tools import KINDS, PARAMETERS, make_tools
from hookline.hooks import EarlyStopping, ModelCheckpoint
from hookline.loggers import read_log

TESTS = Path(__file__).parents[1]
PROBE = """
import time
from hookline import Hook

class Probe(Hook):
    def on_step_end(self, trainer, step):
        time.sleep(0.002)
        trainer.log("probe/step", float(step))
"""
CONFIG = """
module = "cli_parts.Net"
datamodule = "cli_parts.Data"
[trainer]
max_epochs = 2
[hooks.speaking]
class_path = "cli_parts.Speaking"
[hooks.lr_monitor]
"""


class Expensive(Hook):
    def on_step_end(self) -> None:
        time.sleep(0.005)


class Cheap(Hook):
    def on_step_end(self) -> None: ...


class Breaks(Hook):
    def on_after_backward(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("the loss exploded")


class Odd(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("odd", float("nan") if self.trainer.global_step >= 3 else 1.0)
        return super().training_step(batch, batch_idx)


@dataclass
class World:
    """What there is, and the truth about it."""

    folder: Path
    assistant: Assistant
    trainers: dict[str, Any] = field(default_factory=dict)
    job: Any = None

    def ask(self, tool: str, /, **given: Any) -> Any:
        return self.assistant.ask(tool, **given)

    def log(self, run: str, kind: str = "metrics") -> list[dict[str, Any]]:
        """The records of a run's log: the truth about what it logged."""
        return [each for each in read_log(self.folder / "runs" / run) if each["type"] == kind]

    def truth(self) -> list[dict[str, Any]]:
        """What the running job has done so far."""
        text = (self.folder / "runs" / "live" / "truth.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition is true, and return it."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.02)
        raise AssertionError("it did not happen within two minutes")

    def wait_for_steps(self, count: int) -> None:
        last = self.ask("job_status", run="live")["step"] + count
        self.wait_for(lambda: self.ask("job_status", run="live")["step"] >= last)


def start_job(run_dir: Path) -> Any:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    output = (run_dir.parent.parent / f"{run_dir.name}.output").open("w")
    with output:
        job = preloaded.Popen(
            [sys.executable, TESTS / "cli" / "mcp_job.py", run_dir],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + 120
    while not (run_dir / "control.sock").exists():
        assert job.poll() is None and time.monotonic() < end, "the job does not start"
        time.sleep(0.02)
    return job


def end_job(job: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGKILL)
    job.wait(60)


def record_runs(folder: Path) -> dict[str, Any]:
    """Make real runs: two to compare, one that failed, one that stopped early, one with NaN; and a long log."""
    trainers: dict[str, Any] = {}

    def fit(name: str, net: Net, *hooks: Hook, **options: Any) -> None:
        options = {"max_epochs": 3, "log_every_n_steps": 1, "checkpoint": True, **options}
        trainers[name] = quiet(run_dir=folder / name, logger=True, hooks=[*hooks], **options)
        trainers[name].fit(net, batches(), batches(2))

    keeps = ModelCheckpoint(monitor="val/loss")
    fit("good/a", Net(0.1), Expensive(), Cheap(), keeps, trace=True)
    fit("good/b", Net(0.001), keeps)
    with pytest.raises(RuntimeError, match="exploded"):
        fit("failed", Net(), Breaks())
    fit("early", Net(1e-9), EarlyStopping(monitor="val/loss", patience=1, min_delta=1.0), max_epochs=9)
    fit("odd", Odd())
    written(folder / "long", *(metrics(step, loss=1 / (1 + step)) for step in range(5000)))
    written(folder / "wide", metrics(1, **{f"m{number}": number for number in range(400)}))
    return trainers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("assistant")
    (folder / "code").mkdir()
    (folder / "code" / "probe.py").write_text(PROBE)
    (folder / "code" / "cli_parts.py").write_text(PARTS)
    (folder / "code" / "run.toml").write_text(CONFIG)
    (folder / "code" / "wrong.toml").write_text(CONFIG.replace("lr_monitor", "lr_monitr"))
    (folder / "secret.py").write_text(PROBE)
    trainers = record_runs(folder / "runs")
    job = start_job(folder / "runs" / "live")
    try:
        with assistant(folder, "--control", "--code", "code") as made:
            yield World(folder, made, trainers, job)
    finally:
        end_job(job)


# ---- tasks about recorded runs: an answer from JSON alone, and the truth -----------------------------------

Task = tuple[Callable[[World], Any], Callable[[World], Any]]


def rows(world: World, run: str, over: str) -> list[dict[str, Any]]:
    return [each for each in world.log(run) if each.get("over") == over]


def listed(world: World, **given: Any) -> dict[str, Any]:
    return {each["run"]: each for each in world.ask("list_runs", **given)["runs"]}


def metric(world: World, run: str, name: str, over: str = "epoch") -> dict[str, Any]:
    found = world.ask("run_summary", run=run)["metrics"]
    return next(each for each in found if (each["name"], each["over"]) == (name, over))


def better_run(world: World) -> str:
    data = world.ask("compare_runs", runs=["good/a", "good/b"])
    sign = 1 if data["runs"][0]["best"]["direction"] == "lower" else -1
    return str(min(data["runs"], key=lambda each: sign * each["best"]["value"])["run"])


def true_better_run(world: World) -> str:
    best = {
        run: min(each["metrics"]["val/loss"] for each in rows(world, run, "evaluation"))
        for run in ("good/a", "good/b")
    }
    return min(best, key=lambda run: best[run])


TASKS: dict[str, Task] = {
    "which runs are there": (
        lambda w: {*listed(w)} >= {"good/a", "good/b", "failed", "early", "odd", "live", "long", "wide"},
        lambda w: True,
    ),
    "which runs are completed": (
        lambda w: {*listed(w, status="completed")},
        lambda w: {"good/a", "good/b", "odd"},
    ),
    "how many steps a run has made": (
        lambda w: listed(w)["good/a"]["step"],
        lambda w: w.trainers["good/a"].global_step,
    ),
    "how many epochs": (lambda w: w.ask("run_summary", run="good/b")["epochs"], lambda w: 3),
    "the best validation loss": (
        lambda w: w.ask("run_summary", run="good/a")["best"]["value"],
        lambda w: min(each["metrics"]["val/loss"] for each in rows(w, "good/a", "evaluation")),
    ),
    "the step of the best validation loss": (
        lambda w: w.ask("run_summary", run="good/a")["best"]["step"],
        lambda w: min(rows(w, "good/a", "evaluation"), key=lambda each: each["metrics"]["val/loss"])["step"],
    ),
    "which of two runs is better": (better_run, true_better_run),
    "which setting explains the difference of two runs": (
        lambda w: [
            each["values"]
            for each in w.ask("compare_runs", runs=["good/a", "good/b"])["differences"]
            if each["key"].endswith("lr")
        ][:1],
        lambda w: [[0.1, 0.001]],
    ),
    "why a run failed": (
        lambda w: w.ask("run_summary", run="failed")["error"],
        lambda w: {"type": "RuntimeError", "message": "the loss exploded"},
    ),
    "at which step it failed": (
        lambda w: w.ask("run_events", run="failed", kind="failure")["events"][0]["step"],
        lambda w: w.trainers["failed"].global_step,
    ),
    "which hook made it fail": (
        lambda w: [
            name for name in ("breaks", "expensive") if name in w.ask("run_events", run="failed")["failure"]
        ],
        lambda w: ["breaks"],
    ),
    "why a run ended early": (
        lambda w: w.ask("run_events", run="early")["reason"],
        lambda w: w.trainers["early"].state.stop_reason,
    ),
    "the most expensive hook": (
        lambda w: w.ask("hook_costs", run="good/a")["hooks"][0]["name"],
        lambda w: max(w.log("good/a", "cost")[-1]["rows"], key=lambda each: each["total"])["hook"],
    ),
    "what this hook cost": (
        lambda w: [w.ask("hook_costs", run="good/a")["hooks"][0][key] for key in ("calls", "total")],
        lambda w: [
            [each["calls"], each["total"]]
            for each in w.log("good/a", "cost")[-1]["rows"]
            if each["hook"] == "expensive"
        ][0],
    ),
    "the slowest call in a trace": (
        lambda w: [
            (each["name"], each["event"], each["calls"])
            for each in w.ask("describe_trace", run="good/a")["slowest_calls"]
            if each["receiver"] == "hooks"
        ][0],
        lambda w: ("expensive", "on_step_end", 12),
    ),
    "the slowest kind of event in a trace that hooks listen to": (
        lambda w: [
            each["event"]
            for each in w.ask("describe_trace", run="good/a", limit=100)["slowest_events"]
            if each["event"].startswith("on_step")
        ][0],
        lambda w: "on_step_end",
    ),
    "how long the longest of these events took": (
        lambda w: [
            round(each["longest"], 6)
            for each in w.ask("describe_trace", run="good/a", limit=100)["slowest_events"]
            if each["event"] == "on_step_end"
        ],
        lambda w: [round(max(durations(w, "on_step_end")) / 1e6, 6)],
    ),
    "whether a run was traced": (
        lambda w: "There is no trace" in w.assistant.refused("describe_trace", run="good/b"),
        lambda w: not (w.folder / "runs/good/b/trace.json").exists(),
    ),
    "the last training loss": (
        lambda w: metric(w, "good/a", "train/loss", "step")["last"],
        lambda w: {
            "value": rows(w, "good/a", "step")[-1]["metrics"]["train/loss"],
            "step": rows(w, "good/a", "step")[-1]["step"],
        },
    ),
    "the loss at every step": (
        lambda w: w.ask("metric_series", run="good/b", metric="train/loss", over="step")["values"],
        lambda w: [each["metrics"]["train/loss"] for each in rows(w, "good/b", "step")],
    ),
    "the loss at steps five to seven": (
        lambda w: w.ask(
            "metric_series", run="good/b", metric="train/loss", over="step", first_step=5, last_step=7
        )["steps"],
        lambda w: [5, 6, 7],
    ),
    "how often it was validated": (
        lambda w: w.ask("metric_series", run="good/a", metric="val/loss")["count"],
        lambda w: len(rows(w, "good/a", "evaluation")),
    ),
    "whether the loss of a long run still falls": (
        lambda w: metric(w, "long", "loss")["trend"],
        lambda w: "improving",
    ),
    "which metric became NaN, and when": (
        lambda w: [
            (each["text"], each["step"])
            for each in w.ask("run_events", run="odd", kind="not finite")["events"]
        ],
        lambda w: [
            ("odd is nan", next(each["step"] for each in w.log("odd") if each["metrics"].get("odd") == "nan"))
        ],
    ),
    "the last value that is not a number": (
        lambda w: w.ask("metric_series", run="odd", metric="odd", over="step")["values"][-1],
        lambda w: "nan",
    ),
    "the newest checkpoint": (
        lambda w: Path(w.ask("run_summary", run="good/a")["checkpoints"][0]["path"]).is_dir(),
        lambda w: True,
    ),
    "how many checkpoints there are": (
        lambda w: w.ask("run_summary", run="good/a")["checkpoint_count"],
        lambda w: len(list((w.folder / "runs/good/a").rglob("manifest.json"))),
    ),
    "the size of a run": (
        lambda w: listed(w)["failed"]["bytes"],
        lambda w: sum(
            each.lstat().st_size for each in (w.folder / "runs/failed").rglob("*") if not each.is_dir()
        ),
    ),
    "which hooks a run had": (
        lambda w: sorted(
            key.split(".")[1]
            for key in w.ask("run_summary", run="good/a")["settings"]
            if key.startswith("hooks.") and key.endswith(".class")
        ),
        lambda w: sorted(w.trainers["good/a"].hooks.list_hooks()),
    ),
    "an option of a run": (
        lambda w: w.ask("run_summary", run="early")["settings"]["trainer.max_epochs"],
        lambda w: w.trainers["early"].options.max_epochs,
    ),
    "how long the training took": (
        lambda w: w.ask("run_summary", run="good/a")["cost"]["time"]["total"],
        lambda w: w.log("good/a", "timings")[-1]["total"],
    ),
    "which hooks a configuration would have": (
        lambda w: (
            {
                listener["name"]
                for event in w.ask("explain_configuration", config="run.toml")["events"]
                for listener in event["listeners"]
                if listener["receiver"] == "hooks"
            }
            >= {"speaking", "lr_monitor"}
        ),
        lambda w: True,
    ),
    "what is wrong with a configuration": (
        lambda w: (
            "hooks.lr_monitr: class_path is missing"
            in w.assistant.refused("explain_configuration", config="wrong.toml")
        ),
        lambda w: True,
    ),
}


def durations(world: World, event: str) -> list[float]:
    text = (world.folder / "runs/good/a/trace.json").read_text()
    return [each["dur"] for each in json.loads(text) if each["name"] == event and each.get("cat") == "event"]


@pytest.mark.parametrize("task", TASKS)
def test_an_assistant_answers_a_question_about_a_recorded_run(task: str, world: World) -> None:
    answer, truth = TASKS[task]
    assert answer(world) == truth(world)


# ---- tasks with a running job ------------------------------------------------------------------------------


def test_it_sees_which_run_is_running_and_its_process(world: World) -> None:
    assert [*listed(world, status="running")] == ["live"]
    status = world.ask("job_status", run="live")
    assert (status["pid"], status["world_size"], status["status"]) == (world.job.pid, 1, "training")


def test_it_sees_the_job_progress(world: World) -> None:
    before = world.ask("job_status", run="live")["step"]
    world.wait_for(lambda: world.ask("job_status", run="live")["step"] > before)
    assert world.truth()[-1]["step"] >= before


def test_it_attaches_a_probe_reads_what_it_logs_sees_its_cost_and_detaches_it(world: World) -> None:
    attached = world.ask("attach_probe", run="live", file="probe.py", class_name="Probe")
    assert (attached["done"], attached["hook"], attached["class"]) == (True, "probe", "Probe")
    logged = world.wait_for(lambda: try_series(world, "probe/step"))
    assert (
        logged["values"] == [float(each) for each in logged["steps"]]
        and logged["steps"][0] > attached["step"]
    )
    costs = {each["name"]: each for each in world.ask("hook_costs", run="live")["hooks"]}
    probe = costs["probe"]
    assert probe["attached"] and probe["total"] >= 0.002 * probe["calls"] > 0 and 0 < probe["share"] < 1
    assert world.ask("detach_hook", run="live", hook="probe")["done"]
    assert "probe" not in [each["name"] for each in world.ask("hook_costs", run="live")["hooks"]]


def try_series(world: World, name: str) -> Any:
    with contextlib.suppress(Exception):
        return world.ask("metric_series", run="live", metric=name, over="step")


def test_it_validates_now_and_the_metrics_are_those_of_the_log(world: World) -> None:
    answer = world.ask("validate_now", run="live", wait=120)
    found = [each for each in world.truth() if "validated" in each]
    assert {"step": answer["step"], "validated": answer["metrics"]["val/loss"]} in found
    series = world.wait_for(lambda: try_evaluation(world, answer["step"]))
    assert series["values"] == [answer["metrics"]["val/loss"]]


def try_evaluation(world: World, step: int) -> Any:
    found = world.ask("metric_series", run="live", metric="val/loss", first_step=step, last_step=step)
    return found if found["count"] else None


def test_it_changes_the_learning_rate_and_the_next_updates_use_it(world: World) -> None:
    answer = world.ask("set_learning_rate", run="live", value=0.02)
    half = world.ask("set_learning_rate", run="live", value="x0.5", group=0)
    assert answer["groups"][0]["lr"] == 0.02
    assert half["groups"] == [{"group": 0, "name": None, "before": 0.02, "lr": 0.01}]
    world.wait_for_steps(3)
    used = {each["step"]: each["lr"] for each in world.truth() if "lr" in each}
    assert used[answer["step"]] == 0.02 or answer["step"] == half["step"]
    assert used[half["step"]] == 0.01 and {used[step] for step in used if step >= half["step"]} == {0.01}


def calls_of(world: World, hook: str) -> Any:
    return next(each for each in world.ask("hook_costs", run="live")["hooks"] if each["name"] == hook)


def test_it_switches_a_hook_off_and_on(world: World) -> None:
    assert world.ask("disable_hook", run="live", hook="ticks")["done"]
    before = calls_of(world, "ticks")
    world.wait_for_steps(5)
    assert calls_of(world, "ticks")["calls"] == before["calls"] and not before["enabled"]
    world.ask("enable_hook", run="live", hook="ticks")
    world.wait_for(lambda: calls_of(world, "ticks")["calls"] > before["calls"])


def test_it_calls_a_hook_less_often(world: World) -> None:
    answer = world.ask("set_hook_interval", run="live", hook="ticks", interval="10 steps")
    assert answer["interval"] == "10 steps" and calls_of(world, "ticks")["every"] == "every 10 steps"


def test_it_saves_a_checkpoint(world: World) -> None:
    answer = world.ask("save_checkpoint", run="live", wait=120)
    manifest = json.loads((Path(answer["path"]) / "manifest.json").read_text())
    assert (manifest["step"], manifest["reason"]) == (answer["saved_step"], "manual")


def test_it_reads_the_changes_that_were_made_to_a_job(world: World) -> None:
    done = world.ask("disable_hook", run="live", hook="truth")
    world.ask("enable_hook", run="live", hook="truth")
    found = world.wait_for(
        lambda: [
            each
            for each in world.ask("run_events", run="live", kind="control", limit=500)["events"]
            if each["text"] == "disable truth" and each["step"] == done["step"]
        ]
    )
    assert found[0]["time"].startswith("20")


def test_a_job_that_does_not_answer_in_time_is_not_done(world: World) -> None:
    assert world.ask("save_checkpoint", run="live", wait=0)["done"] is False


def test_it_stops_a_job_and_learns_what_is_saved(world: World) -> None:
    job = start_job(world.folder / "runs" / "short")
    try:
        world.wait_for(lambda: world.ask("job_status", run="short")["step"] > 2)
        answer = world.ask("stop_run", run="short", wait=120)
        assert job.wait(120) == 0
    finally:
        end_job(job)
    assert (answer["status"], answer["saved"], answer["saved_step"]) == ("stopped", True, answer["step"])
    summary = world.ask("run_summary", run="short")
    assert (summary["status"], summary["reason"]) == ("stopped", "requested by hookline control")
    assert "No job is training in" in world.assistant.refused("validate_now", run="short")


def connections() -> int:
    """How many ends of control sockets there are on this machine, those that wait to be accepted included."""
    return sum(line.endswith("control.sock") for line in Path("/proc/net/unix").read_text().splitlines())


def test_a_job_that_dies_while_it_is_asked_is_an_error_and_the_server_lives(world: World) -> None:
    job = start_job(world.folder / "runs" / "killed")
    try:
        world.wait_for(lambda: world.ask("job_status", run="killed")["step"] > 2)
        os.kill(job.pid, signal.SIGSTOP)  # it accepts the connection and does not answer
        before = connections()
        answer = world.assistant.portal.start_task_soon(
            world.assistant.client.call_tool, "validate_now", {"run": "killed", "wait": 300}
        )
        world.wait_for(lambda: connections() > before or answer.done())
    finally:
        end_job(job)
    died = answer.result(120)
    # by the time of the kill: in the answer, in the connection, or before it
    known = ("ended before it answered", "cannot be reached", "it was killed, or")
    assert died.is_error and any(text in died.content[0].text for text in known), died.content[0].text
    assert listed(world)["killed"]["status"] == "killed"
    assert "it was killed, or it runs on another machine" in world.assistant.refused(
        "job_status", run="killed"
    )


# ---- limits and permissions --------------------------------------------------------------------------------


def test_a_wrong_name_comes_with_the_nearest_right_one(world: World) -> None:
    refused = world.assistant.refused
    assert "There is no run 'good/c'" in refused("run_summary", run="good/c")
    assert "Did you mean 'failed'?" in refused("run_events", run="faild")
    assert "Did you mean 'val/loss'?" in refused("metric_series", run="good/a", metric="val/los")
    assert "Did you mean 'ticks'?" in refused("disable_hook", run="live", hook="tick")
    assert "Did you mean 'probe.py'?" in refused("attach_probe", run="live", file="prob.py")
    assert "There are runs below it" in refused("run_summary", run="good")
    assert "lr 'fast': give a learning rate above 0" in refused("set_learning_rate", run="live", value="fast")


def test_wrong_arguments_are_named(world: World) -> None:
    refused = world.assistant.refused
    assert "max_points" in refused("metric_series", run="good/a", metric="val/loss", max_points=3)
    assert "limit=0 must be from 1 to 1000" in refused("metric_series", run="long", metric="loss", limit=0)
    assert "wait=1e+09 must be a number of seconds from 0 to 600" in refused("stop_run", run="live", wait=1e9)
    assert "compare_runs takes 2 to 10 runs; got 1" in refused("compare_runs", runs=["good/a"])


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "linked file", "null", "home", "circle"])
def test_nothing_outside_the_folder_is_opened(kind: str, world: World) -> None:
    runs, outside = world.folder / "runs", world.folder / "outside"
    if not outside.exists():
        written(outside, metrics(1, loss=1.0))
    link = runs / f"a {kind}"
    if kind == "link":
        link.symlink_to(outside)
    elif kind == "linked file":
        link.mkdir()
        (link / "log.jsonl").symlink_to(outside / "log.jsonl")
    elif kind == "circle":
        link.symlink_to(link)
    given = {
        "parent": "../outside",
        "absolute": str(outside),
        "null": "good/a\0",
        "home": "good/a/../../../outside",
    }.get(kind, link.name)
    try:
        for tool, more in (
            ("run_summary", {}),
            ("metric_series", {"metric": "loss"}),
            ("job_status", {}),
            ("describe_trace", {}),
            ("stop_run", {}),
        ):
            refusal = world.assistant.refused(tool, run=given, **more)
            assert "outside" in refusal or "is not below" in refusal or "is not opened" in refusal
        assert not any("outside" in name or name == link.name for name in listed(world))
    finally:
        if link.is_symlink():
            link.unlink()


def test_code_and_traces_outside_their_folder_are_not_opened(world: World) -> None:
    refused = world.assistant.refused
    for file in ("../secret.py", str(world.folder / "secret.py"), "../runs/../secret.py"):
        assert "is not below" in refused("attach_probe", run="live", file=file)
    assert "is not below" in refused("explain_configuration", config="../elsewhere.toml")
    assert "ends with .toml or .yaml or .yml" in refused("explain_configuration", config="probe.py")
    assert "is not below" in refused("describe_trace", run="good/a", trace="../../../secret.py")
    linked = world.folder / "code" / "linked.py"
    linked.symlink_to(world.folder / "secret.py")
    assert "is not below" in refused("attach_probe", run="live", file="linked.py")


def test_answers_are_limited_in_size(world: World) -> None:
    series = world.ask("metric_series", run="long", metric="loss", limit=50)
    assert series["count"] == 5000 and len(series["steps"]) == len(series["values"]) == 50
    assert (series["steps"][0], series["steps"][-1]) == (0, 4999)
    assert len(world.ask("metric_series", run="long", metric="loss", limit=1000)["steps"]) == 1000
    wide = world.ask("run_summary", run="wide")
    assert (len(wide["metrics"]), wide["metric_count"]) == (50, 400)
    assert len(listed(world, limit=2)) == 2 and world.ask("list_runs", limit=2)["count"] > 2
    text = "x" * 400_000
    events = [{"type": "note", "text": f"{text}{number}", "step": number} for number in range(400)]
    written(
        world.folder / "runs" / "loud", *events[:3], *({"type": "note", "n": f"{n:>900}"} for n in range(200))
    )
    few = world.ask("run_events", run="loud", limit=3)
    assert max(len(each["text"]) for each in few["events"]) <= 1000
    assert "allowed: at most 100,000. Ask for less" in world.assistant.refused(
        "run_events", run="loud", limit=500
    )


def test_a_file_of_a_run_that_cannot_be_read_is_a_message(world: World) -> None:
    folder = world.folder / "runs" / "broken"
    folder.mkdir()
    (folder / "log.jsonl").write_text("this is not JSON\n")
    assert "is not a log of Hookline" in world.assistant.refused("run_summary", run="broken")


def test_every_tool_is_described_and_says_whether_it_changes_anything(world: World) -> None:
    tools = world.assistant.tools()
    assert [*tools] == [*KINDS]
    for name, tool in tools.items():
        assert tool.description and len(tool.description) < 300, name
        for parameter, schema in tool.input_schema["properties"].items():
            assert schema["description"] == PARAMETERS[parameter]
        assert tool.annotations.read_only_hint is KINDS[name].reads
    changing = {name for name, tool in tools.items() if tool.annotations.destructive_hint}
    assert changing == {"stop_run", "detach_hook", "set_learning_rate", "attach_probe"}
    used = {each for tool in tools.values() for each in tool.input_schema["properties"]}
    assert used == {*PARAMETERS}


def test_the_documentation_names_every_tool_and_what_it_needs(tmp_path: Path) -> None:
    page = (TESTS.parent / "docs" / "mcp.md").read_text()
    cells = [
        line.split("|")[1:3]
        for line in page.splitlines()
        if line.startswith("| `") and "_" in line.split("|")[1]
    ]
    needs = {name.strip(" `"): need.strip(" `").split() for name, need in cells}
    assert [*needs] == [*KINDS]
    folder = ServedFolder(tmp_path)
    for name, options in needs.items():
        given: dict[str, Any] = {}
        assert (name in make_tools(folder)) is (not options)
        for option in options:
            assert name not in make_tools(folder, **given)
            given |= {"control": True} if option == "--control" else {"code": folder}
        assert name in make_tools(folder, **given)


def test_only_what_was_permitted_is_registered(tmp_path: Path) -> None:
    folder = ServedFolder(tmp_path)
    reading = {*make_tools(folder)}
    assert reading == {name for name, kind in KINDS.items() if kind.reads}
    controlling = {*make_tools(folder, control=True)} - reading
    assert "stop_run" in controlling and not {"attach_probe", "explain_configuration"} & controlling
    assert {*make_tools(folder, code=folder)} - reading == {"explain_configuration"}
    assert {*make_tools(folder, control=True, code=folder)} == {*KINDS}


def test_it_listens_on_no_port_and_prints_nothing_but_the_protocol(world: World) -> None:
    listening = {
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    servers = [
        each
        for each in Path("/proc").iterdir()
        if each.name.isdecimal()
        and b"hookline\0mcp" in read_bytes(each / "cmdline")
        and os.readlink(each / "cwd") == str(world.folder)
    ]
    assert len(servers) == 1
    inodes = {
        os.readlink(each).removeprefix("socket:[").rstrip("]") for each in (servers[0] / "fd").iterdir()
    }
    assert not inodes & listening
    assert world.assistant.errors.read_text() == ""


def read_bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_folder_that_does_not_exist_and_a_missing_package_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs").mkdir()
    assert main(["mcp", "rans"]) == 2
    assert "rans does not exist; pass a folder. Did you mean 'runs'?" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert main(["mcp"]) == 2
    assert 'pip install "hookline[mcp]"' in capsys.readouterr().err
