"""The list of runs: what is there, whether it still runs, and nothing that a damaged or hostile directory can do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import preloaded
import pytest
import torch
from report.reported import evaluation_row, recorded
from tiny import Net, batches, quiet

import hookline
from hookline import Hook
from hookline.cli import main
from hookline.hooks import ModelCheckpoint
from hookline.report import runs
from hookline.report.runs import ListedRun, list_runs
from hookline.run import lock as runlock


def only() -> ListedRun:
    (found,) = list_runs(Path()).runs
    return found


# ---- real runs ---------------------------------------------------------------------------------------------------


def test_a_monitored_best_value_has_its_step_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = [ModelCheckpoint(monitor="val/loss")]
    quiet(logger=True, run_dir="runs/a", max_epochs=3, hooks=hooks).fit(Net(), batches(), batches())
    assert main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"][0]["best"]
    assert main(["summary", "a", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["runs"][0]["best"]
    assert best["step"] is not None and listed == {**best, "is_partial": False}
    Path("runs/a/log.jsonl").unlink()  # nothing else has it
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["best"]["step"] is None


def test_a_cell_shows_a_table_with_the_settings_that_differ() -> None:
    for lr in (0.1, 0.2):
        net = torch.nn.Linear(4, 2)
        trainer = quiet(logger=True, run_dir=f"runs/lr-{lr}", seed=0)
        sgd = torch.optim.SGD(net.parameters(), lr=lr)
        trainer.fit(net, batches(), batches(), loss=torch.nn.functional.mse_loss, optimizer=sgd)
    found = hookline.list_runs("runs")
    head, second, first = repr(found).splitlines()
    assert head.split() == ["run", "status", "step", "epochs", "best", "age", "size", "lr"]
    assert second.split()[0] == "lr-0.2" and second.endswith(" 0.2")
    assert first.split()[:2] == ["lr-0.1", "completed"] and first.endswith(" 0.1")
    shown = found._repr_html_()
    assert "<table" in shown and ">lr-0.2<" in shown and "val/loss" in shown
    assert len(repr(found.runs)) < 1000


def test_a_run_that_failed_early_does_not_hide_the_setting_that_a_sweep_varies() -> None:
    def fails(model: torch.nn.Module, batch: object) -> None:
        raise ValueError("no step")

    for lr in (0.1, 0.2, 0.3):
        net = torch.nn.Linear(4, 2)
        trainer = quiet(logger=True, run_dir=f"runs/lr-{lr}", seed=0, num_sanity_val_steps=1)
        sgd = torch.optim.SGD(net.parameters(), lr=lr)
        if lr == 0.3:
            trainer.add_hook(ModelCheckpoint())
            with pytest.raises(ValueError, match="no step"):
                trainer.fit(net, batches(), batches(), step=fails, optimizer=sgd)
        else:
            trainer.fit(net, batches(), batches(), loss=torch.nn.functional.mse_loss, optimizer=sgd)
    head, failed, *_ = repr(hookline.list_runs("runs")).splitlines()
    # the settings of loaders and optimizers that it has not recorded are not differences, the hook is one
    assert head.split()[7:] == ["lr", "model_checkpoint"]
    assert failed.split()[0] == "lr-0.3" and failed.split()[-2:] == ["-", "ModelCheckpoint"]


def test_runs_of_one_second_are_listed_newest_first() -> None:
    names = ["c", "a", "d", "b"]
    for name in names:
        quiet(logger=True, run_dir=f"runs/{name}").fit(Net(), batches(1))
    assert [each.path.name for each in list_runs(Path("runs")).runs] == names[::-1]


def test_a_cell_shows_a_folder_without_runs_and_escapes_names() -> None:
    Path("<i>").mkdir()
    assert hookline.list_runs("<i>")._repr_html_() == "<div>There are no runs in &lt;i&gt; or below it.</div>"
    quiet(logger=True, run_dir="<i>/<b>").fit(Net(), batches())
    assert "&lt;b&gt;" in hookline.list_runs("<i>")._repr_html_()


def test_a_run_that_trains_is_running_and_its_lock_is_not_touched() -> None:
    seen: list[tuple[str, bool]] = []

    class Lists(Hook):
        def on_step_end(self) -> None:
            before = (Path("run/run.lock").stat(), sorted(os.listdir("run")))
            seen.append((only().status, only().is_certain))
            assert before[1] == sorted(os.listdir("run"))

    quiet(logger=True, run_dir="run", hooks=[Lists()]).fit(Net(), batches())
    assert set(seen) == {("running", True)} and only().status == "completed"


RUNNING = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from tiny import Net, batches, quiet
    from hookline import Hook

    class Waits(Hook):
        def on_step_end(self, step):
            if step == 2:
                print("here", flush=True)
                time.sleep(600)

    quiet(hooks=[Waits()], run_dir="run", logger=True).fit(Net(), batches())
"""


@pytest.mark.timeout(300)
def test_another_process_is_seen_running_and_then_killed() -> None:
    code = textwrap.dedent(RUNNING.format(tests=str(Path(__file__).parents[1])))
    with preloaded.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == "here\n"
            assert (only().status, only().is_certain) == ("running", True)
        finally:
            job.kill()
    assert (only().status, only().is_certain) == ("killed", True)


def test_a_failed_run_is_failed() -> None:
    class Fails(Hook):
        def on_step_end(self) -> None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        quiet(logger=True, run_dir="run", hooks=[Fails()]).fit(Net(), batches())
    assert only().status == "failed"


def test_an_evaluation_without_a_fit_is_completed() -> None:
    quiet(logger=True, run_dir="run").validate(Net(), batches(2))
    assert (only().status, only().is_certain, only().step) == ("completed", True, 0)


# ---- locks of other machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "said"), [(1.0, ("running", True)), (-3600.0, ("running", True)), (3600.0, ("killed", False))]
)
def test_a_job_of_another_machine_is_known_by_its_signs_of_life(age: float, said: tuple[str, bool]) -> None:
    path = recorded("run", status="training")
    lock = path / runlock.LOCK_FILE
    lock.write_text(
        json.dumps(
            {
                "token": "x",
                "host": "elsewhere",
                "pid": 1,
                "boot": "other",
                "namespace": "other",
                "started": "1",
            }
        )
    )
    os.utime(lock, (time.time() - age,) * 2)
    before = sorted(os.listdir(path))
    assert (only().status, only().is_certain) == said
    assert sorted(os.listdir(path)) == before  # nothing is written for it


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", '{"token": 1}', '{"token": "x", "pid": "../..", "boot": []}', "x" * 100_000],
    ids=range(6),
)
def test_a_damaged_lock_is_no_error(content: str) -> None:
    path = recorded("run", status="training")
    (path / runlock.LOCK_FILE).write_text(content)
    assert only().status in ("running", "killed")


def test_a_lock_that_is_no_file_is_not_waited_for() -> None:
    path = recorded("run", status="training")
    os.mkfifo(path / runlock.LOCK_FILE)
    assert (only().status, only().is_certain) == ("killed", False)


def test_a_run_without_a_lock_that_says_it_trains_is_doubted() -> None:
    recorded("run", status="training", noted_at="2020-01-01T00:00:00+00:00")
    assert (only().status, only().is_certain) == ("killed", False)
    assert main(["runs"]) == 0


# ---- older runs, and long logs -----------------------------------------------------------------------------------


def test_a_run_of_an_older_version_is_known_by_its_log() -> None:
    recorded(
        "run",
        [
            evaluation_row(1, loss=3.0),
            evaluation_row(2, loss=1.0),
            evaluation_row(3, loss=2.0),
            {
                "type": "end",
                "time": 5.0,
                "step": 3,
                "epoch": 0,
                "epochs": 1,
                "status": "completed",
                "reason": "",
            },
        ],
    )
    found = only()
    assert (found.status, found.step, found.epochs, found.started) == ("completed", 3, 1, 2.0)
    assert found.best is not None and (found.best.metric, found.best.value, found.best.step) == (
        "loss",
        1.0,
        2,
    )


def test_superseded_values_do_not_count() -> None:
    path = recorded("run", [evaluation_row(1, loss=3.0), evaluation_row(2, loss=1.0)])
    log = path / "log.jsonl"
    first = len(json.dumps(evaluation_row(1, loss=3.0))) + 1
    resume = {
        "type": "resume",
        "time": 9.0,
        "step": 1,
        "superseded": {"from": first, "to": log.stat().st_size, "records": 1},
    }
    log.write_text(
        log.read_text() + "".join(json.dumps(each) + "\n" for each in (resume, evaluation_row(2, loss=2.5)))
    )
    best = only().best
    assert best is not None and best.value == 2.5


def test_of_a_long_log_only_the_end_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "LOG_BYTES", 10_000)
    monkeypatch.setattr(runs, "TAIL_BYTES", 5_000)
    recorded("run", [evaluation_row(n, loss=float(n)) for n in range(1000)])
    found = only()
    assert found.best is not None and found.is_partial and found.best.value > 900 and found.step == 999
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["best"]["is_partial"] is True


# ---- damaged and hostile directories -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"id": 1}',
        b"x" * (2**20 + 1),
        b"null",
        b'{"id":"a","status":"completed","reason":"","step":1e999,"limits":{}}',
    ],
    ids=range(8),
)
def test_a_damaged_record_is_listed_and_no_error(content: bytes) -> None:
    Path("run").mkdir()
    Path("run/run.json").write_bytes(content)
    assert (only().status, only().reason) == ("unreadable", "run.json cannot be read")
    assert main(["runs"]) == 0 and main(["runs", "--json"]) == 0


def test_fields_of_any_type_are_no_error() -> None:
    for number, odd in enumerate(
        [None, [], {}, "x", -1, 1e300, "9999-99-99", [[]], {"a": {"metric": {}, "mode": "min"}}]
    ):
        recorded(
            f"runs/{number}",
            [],
            epochs=odd,
            monitors=odd,
            started_at=odd,
            noted_at=odd,
            sessions=odd,
            error=odd,
            machine=odd,
            settings=odd,
            options=odd,
            hooks=odd,
            module=odd,
            git=odd,
            versions=odd,
            config=odd,
            command=odd,
            checkpoint=odd,
            time=odd,
        )
        assert main(["summary", f"runs/{number}"]) == 0 and main(["summary", f"runs/{number}", "--json"]) == 0
    assert main(["runs"]) == 0 and main(["runs", "--json"]) == 0
    assert main(["summary", *map(str, Path("runs").iterdir())]) == 0


def test_files_that_are_no_files_are_not_waited_for() -> None:
    Path("run").mkdir()
    for name in ("run.json", "log.jsonl", "run.lock", "control.sock"):
        os.mkfifo(Path("run", name))
    assert list_runs(Path()).runs == [] or only().status == "unreadable"


def test_a_directory_that_may_not_be_read_is_named() -> None:
    recorded("runs/a", status="completed")
    recorded("runs/b", status="completed")
    os.chmod(".", 0o755)
    os.chmod("runs/b", 0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # nothing is forbidden to root
    try:
        found = list_runs()
    finally:
        os.seteuid(user)
        os.chmod("runs/b", 0o700)
    assert [str(each.path) for each in found.runs] == ["runs/a"] and found.problems == [
        "runs/b: Permission denied"
    ]


def test_links_are_not_followed_and_checkpoints_are_not_runs() -> None:
    path = recorded("runs/a", status="completed")
    (path / "again").symlink_to(Path("..").resolve(), target_is_directory=True)
    (path / "big").symlink_to("/dev/zero")
    (path / "checkpoints" / "x").mkdir(parents=True)
    (path / "checkpoints" / "x" / "run.json").write_text("{}")
    found = list_runs(Path("runs")).runs
    assert [each.path for each in found] == [path] and found[0].bytes < 10_000


def test_a_log_of_another_tool_is_said_to_be_one() -> None:
    Path("other").mkdir()
    Path("other/log.jsonl").write_text('{"loss": 1}\n')
    assert only().status == "unreadable"


def test_a_thousand_runs_take_seconds() -> None:
    for number in range(1000):
        log = [evaluation_row(n, **{"val/loss": 1.0 / n, "train/loss": 2.0}) for n in range(1, 31)]
        recorded(
            f"runs/{number:04}",
            log,
            status="completed",
            step=30,
            started_at=f"2026-01-01T00:{number // 60:02}:{number % 60:02}+00:00",
        )
    began = time.process_time()
    found = list_runs().runs
    assert len(found) == 1000 and all(each.best is not None for each in found)
    assert found[0].path.name == "0999"
    assert time.process_time() - began < 20  # 1 s on a quiet machine
