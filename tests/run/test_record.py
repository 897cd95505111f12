"""The record of a run: written as it starts, whole at any moment, without secrets, and no reason to end a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, HooklineError, Module, StopTraining, Trainer, list_runs
from hookline.hooks import EarlyStopping, ModelCheckpoint
from hookline.loggers import CSV, JSONLines, TensorBoard, read_log
from hookline.run import record as records
from hookline.run.record import MOST_SESSIONS, read_record
from hookline.util.errors import CheckpointError
from hookline.util.limited_json import RECORD_BYTES

SECRET = "s3cr3tvalue"
RECORD = Path("run/run.json")


def read() -> dict[str, Any]:
    assert read_record(RECORD.parent) == json.loads(RECORD.read_text())
    return read_record(RECORD.parent)


class Reads(Hook):
    """Keeps what the record says at an event."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, Any]] = {}

    def setup(self) -> None:
        self.seen["setup"] = read_record(RECORD.parent)

    def on_train_batch_start(self) -> None:
        self.seen.setdefault("first batch", read_record(RECORD.parent))


class Fails(Hook):
    def __init__(self, step: int, error: BaseException) -> None:
        super().__init__()
        self.step, self.error = step, error

    def on_step_end(self, step: int) -> None:
        if step == self.step:
            raise self.error


# ---- when it is written ------------------------------------------------------------------------------------------


def test_it_is_there_before_anything_is_set_up_and_says_that_the_run_trains() -> None:
    hook = Reads()
    quiet(hooks=[hook], run_dir="run", logger=True).fit(Net(), batches())
    early = hook.seen["setup"]
    assert (early["status"], early["step"], early["ended_at"], early["version"]) == ("training", 0, None, 1)
    assert hook.seen["first batch"]["settings"]["optimizers.0.groups.0.lr"] == 0.1
    late = read()
    assert (late["status"], late["step"], late["epochs"], late["id"]) == ("completed", 4, 1, early["id"])
    assert late["started_at"] <= late["ended_at"] == late["noted_at"]


def test_a_fit_that_leaves_nothing_leaves_no_record(tmp_path: Path) -> None:
    for options in (
        {"logger": False},
        {"fast_dev_run": True, "logger": True},
        {"logger": False, "run_dir": "made-for-it"},
    ):
        quiet(**options).fit(Net(), batches())
    assert os.listdir() == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").touch()
    quiet(logger=False, run_dir=tmp_path / "mine").fit(Net(), batches())
    assert os.listdir(tmp_path / "mine") == ["note.txt"]


def test_evaluations_and_predictions_do_not_touch_it() -> None:
    trainer = quiet(run_dir="run", logger=True)
    trainer.fit(Net(), batches())
    before = RECORD.read_text()
    trainer.validate(loaders=batches())
    trainer.test(loaders=batches())
    trainer.predict(loaders=batches())
    assert RECORD.read_text() == before


def test_it_says_how_far_the_run_is_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "UPDATE_SECONDS", 0.0)
    seen: list[tuple[int, int]] = []

    class Watches(Hook):
        def on_train_epoch_start(self) -> None:
            seen.append((read()["step"], read()["epochs"]))

    quiet(hooks=[Watches()], run_dir="run", logger=True, max_epochs=3).fit(Net(), batches())
    assert seen == [(0, 0), (4, 1), (8, 2)]


def test_short_epochs_do_not_write_it_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = records.RunRecord.write
    monkeypatch.setattr(records.RunRecord, "write", lambda self: written.append(1) or write(self))
    monkeypatch.setattr(records, "UPDATE_SECONDS", 1000.0)
    quiet(run_dir="run", logger=True, max_epochs=50).fit(Net(), batches())
    assert len(written) == 3  # as it starts, with its settings, and at its end
    assert read()["epochs"] == 50


# ---- what it means -----------------------------------------------------------------------------------------------


def test_a_record_without_a_checkpoint_does_not_mean_that_the_run_can_be_resumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(RuntimeError):
        quiet(hooks=[Fails(2, RuntimeError("on purpose"))], run_dir="run", logger=True).fit(Net(), batches())
    first = read()
    assert first["status"] == "error"
    trainer = quiet(run_dir="run", logger=True)
    trainer.fit(Net(), batches(), resume="auto")
    assert "there is no checkpoint below run, so a new run begins" in caplog.text
    assert trainer.global_step == 4 and read()["id"] != first["id"] and read()["starts"] == 1


def test_a_run_that_begins_anew_disowns_the_checkpoints_before_it(caplog: pytest.LogCaptureFixture) -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    first = read()["id"]
    with pytest.raises(RuntimeError):  # before its first checkpoint
        quiet(hooks=[Fails(1, RuntimeError("on purpose"))], run_dir="run").fit(Net(), batches())
    assert read()["id"] != first
    trainer = quiet(run_dir="run")
    trainer.fit(Net(), batches(), resume="auto")
    assert "belongs to an earlier run and is not used" in caplog.text and trainer.global_step == 4


def test_a_run_resumed_from_checkpoints_without_a_record_is_the_same_run() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    first = read()["id"]
    RECORD.unlink()
    quiet(hooks=[ModelCheckpoint()], run_dir="run", max_epochs=2).fit(Net(), batches(), resume="auto")
    assert read()["id"] == first and read()["step"] == 8


def test_a_record_of_an_older_version_is_read_and_continued() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    old = {name: read()[name] for name in ("id", "status", "reason", "step", "epochs", "limits", "noted_at")}
    RECORD.write_text(json.dumps(old))
    quiet(hooks=[ModelCheckpoint()], run_dir="run", max_epochs=2).fit(Net(), batches(), resume="auto")
    now = read()
    assert (now["id"], now["step"], now["starts"]) == (old["id"], 8, 2)
    assert [each["status"] for each in now["sessions"]] == ["completed", "completed"]


# ---- how it ended ------------------------------------------------------------------------------------------------


def test_a_failed_run_says_what_failed_without_secrets() -> None:
    error = ValueError(f"no answer from https://user:{SECRET}@host/x?sig={SECRET}, token={SECRET}")
    with pytest.raises(ValueError, match="no answer"):
        quiet(hooks=[Fails(2, error)], run_dir="run", logger=True).fit(Net(), batches())
    record = read()
    assert (record["status"], record["step"], record["error"]["type"]) == ("error", 2, "ValueError")
    assert SECRET not in RECORD.read_text() and "no answer from https://" in record["error"]["message"]


def test_a_run_stopped_by_a_hook_says_why() -> None:
    class Stops(Hook):
        def on_step_end(self) -> None:
            raise StopTraining("enough")

    quiet(hooks=[Stops()], run_dir="run", logger=True).fit(Net(), batches())
    assert (read()["status"], read()["reason"], read()["step"]) == ("stopped", "enough", 1)


def test_ctrl_c_is_an_interruption() -> None:
    class Interrupts(Hook):
        def on_step_end(self, step: int) -> None:
            if step == 2:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        quiet(hooks=[Interrupts()], run_dir="run", logger=True).fit(Net(), batches())
    assert read()["status"] == "interrupted"


def test_every_session_of_a_resumed_run_is_kept() -> None:
    for epochs in (1, 2, 3):
        quiet(hooks=[ModelCheckpoint()], run_dir="run", max_epochs=epochs).fit(
            Net(), batches(), resume="auto"
        )
    record = read()
    assert record["starts"] == 3
    assert [(each["first_step"], each["step"], each["status"]) for each in record["sessions"]] == [
        (0, 4, "completed"),
        (4, 8, "completed"),
        (8, 12, "completed"),
    ]
    assert (
        record["sessions"][0]["resumed_from"] is None
        and "checkpoints" in record["sessions"][1]["resumed_from"]
    )
    assert record["started_at"] == record["sessions"][0]["started_at"]


def test_a_run_that_had_ended_keeps_its_record_when_it_is_started_again() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    before = RECORD.read_text()
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches(), resume="auto")
    assert RECORD.read_text() == before


def test_a_resume_that_is_refused_does_not_change_the_record_so_the_corrected_one_trains() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    before = RECORD.read_text()
    wider = Net()
    wider.layer = torch.nn.Linear(4, 3)
    with pytest.raises(CheckpointError, match="do not fit"):
        quiet(hooks=[ModelCheckpoint()], run_dir="run", max_epochs=2).fit(wider, batches(), resume="auto")
    assert RECORD.read_text() == before
    corrected = quiet(hooks=[ModelCheckpoint()], run_dir="run", max_epochs=2)
    corrected.fit(Net(), batches(), resume="auto")
    assert (corrected.status, corrected.global_step) == ("completed", 8)
    assert [each["status"] for each in read()["sessions"]] == ["completed", "completed"]


class Wider(Net):
    """Of the same name in errors, with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)


class WithAdam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("max_epochs", [1, 2], ids=["finished run", "longer run"])
@pytest.mark.parametrize("module", [Wider, WithAdam])
def test_a_resume_that_is_refused_leaves_every_file_of_the_run_as_it_was(
    module: type[Net], max_epochs: int
) -> None:
    def trainer(limit: int) -> Trainer:
        return quiet(run_dir="run", hooks=[ModelCheckpoint()], logger=[JSONLines(), CSV()], max_epochs=limit)

    def files() -> dict[Path, bytes]:
        return {each: each.read_bytes() for each in Path("run").rglob("*") if each.is_file()}

    trainer(1).fit(Net(), batches())
    before = files()
    assert Path("run/log.jsonl") in before and Path("run/metrics.csv") in before
    with pytest.raises(CheckpointError):
        trainer(max_epochs).fit(module(), batches(), resume="auto")
    assert files() == before
    trainer(2).fit(Net(), batches(), resume="auto")
    kinds = [each["type"] for each in read_log("run/log.jsonl")]
    assert kinds.count("hyperparams") == 2 and "failure" not in kinds


def test_a_resume_into_a_new_directory_that_is_refused_leaves_no_run_there() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    with pytest.raises(CheckpointError):
        quiet(run_dir="new", logger=True).fit(Wider(), batches(), resume="run")
    assert not list(Path("new").rglob("*"))


def test_a_resumed_run_is_recorded_as_training_before_its_loaders_are_made() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    seen = []

    class Looks(Hook):
        def setup(self) -> None:
            seen.append(read()["status"])

        def on_fit_start(self) -> None:
            seen.append(read()["status"])

    quiet(hooks=[ModelCheckpoint(), Looks()], run_dir="run", max_epochs=2).fit(
        Net(), batches(), resume="auto"
    )
    assert seen == ["completed", "training"]


def test_sessions_are_bounded() -> None:
    quiet(hooks=[ModelCheckpoint()], run_dir="run").fit(Net(), batches())
    data = read()
    many = [{**data["sessions"][0], "step": number} for number in range(5000)]
    RECORD.write_text(json.dumps({**data, "sessions": many, "starts": 5000}))
    quiet(hooks=[ModelCheckpoint()], run_dir="run", max_epochs=2).fit(Net(), batches(), resume="auto")
    now = read()
    assert len(now["sessions"]) == MOST_SESSIONS and now["starts"] == 5001
    assert (now["sessions"][0]["step"], now["sessions"][-2]["step"], now["sessions"][-1]["step"]) == (
        0,
        4999,
        8,
    )


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from tiny import Net, batches, quiet
    from hookline import Hook
    from hookline.hooks import ModelCheckpoint

    class Dies(Hook):
        def on_step_end(self, step):
            if step == {at}:
                os.kill(os.getpid(), signal.SIGKILL)

    quiet(hooks=[ModelCheckpoint(), Dies()], run_dir="run", logger=True, max_epochs=2).fit(Net(), batches(), resume="auto")
"""


@pytest.mark.timeout(300)
def test_a_killed_run_is_told_from_a_running_one_and_its_session_stays() -> None:
    code = textwrap.dedent(KILLED.format(tests=str(Path(__file__).parents[1]), at=6))
    assert preloaded.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert read()["status"] == "training"
    from hookline.report.runs import list_runs

    listed = list_runs(Path())
    assert [(each.status, each.is_certain) for each in listed.runs] == [("killed", True)]
    quiet(hooks=[ModelCheckpoint()], run_dir="run", logger=True, max_epochs=2).fit(
        Net(), batches(), resume="auto"
    )
    record = read()
    assert [each["status"] for each in record["sessions"]] == ["killed", "completed"]
    assert record["sessions"][0]["ended_at"] and (record["status"], record["step"]) == ("completed", 8)


# ---- what it says ------------------------------------------------------------------------------------------------


class Wide(Module):
    """With arguments of several kinds, one of them a secret."""

    def __init__(self, width: int = 4, api_key: str = SECRET, act: Any = torch.relu) -> None:
        super().__init__()
        self.layer, self.act = torch.nn.Linear(3, width), act

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.act(self.layer(batch[0])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Sends(Hook):
    """As a user writes a hook: arguments become attributes."""

    def __init__(self, url: str, token: str, every: int = 3) -> None:
        super().__init__()
        self.url, self.token, self.every = url, token, every


def test_settings_are_recorded_without_secrets() -> None:
    hook = Sends(f"https://hooks.slack.com/services/{SECRET}", SECRET)
    batch = (torch.randn(2, 3), torch.randn(2, 4))
    quiet(hooks=[hook], run_dir="run", logger=True, seed=7).fit(Wide(width=4), [batch])
    record = read()
    assert SECRET not in RECORD.read_text()
    assert record["module"]["class"].endswith("Wide") and record["module"]["hparams"]["width"] == 4
    assert record["hooks"]["sends"]["params"] == {
        "url": "https://hooks.slack.com/...",
        "token": "(not shown)",
        "every": 3,
    }
    assert (record["options"]["seed"], record["config"]) == (7, None)
    assert record["settings"]["optimizers.0.groups.0.lr"] == 0.25
    assert (
        record["versions"]["torch"] == torch.__version__
        and {"python", "hookline", "numpy"} <= record["versions"].keys()
    )
    assert (
        record["machine"]["device"] == "cpu"
        and record["machine"]["world_size"] == 1
        and record["machine"]["host"]
    )
    assert record["command"] and record["directory"]


def test_the_settings_of_loaders_are_recorded() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.randn(10, 4))

    class Own(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

        def __len__(self) -> int:
            return 10

    class Pairs(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3]])

        def __len__(self) -> int:
            return 2

    class Validated(Wide):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.layer(batch[0]).sum()}

    load = torch.utils.data.DataLoader
    several = {
        "tokens": load(data, batch_size=5),
        "own": load(data, batch_size=2, sampler=Own()),
        "pairs": load(data, batch_sampler=Pairs()),
    }
    quiet(run_dir="run", logger=True).fit(
        Validated(), load(data, batch_size=4, shuffle=True, drop_last=True), several
    )
    found = read()["data"]
    assert found["train"] == {
        "batch_size": 4,
        "shuffle": True,
        "drop_last": True,
        "num_workers": 0,
        "samples": 10,
        "batches": 2,
    }
    assert found["val"]["tokens"] == {
        "batch_size": 5,
        "shuffle": False,
        "drop_last": False,
        "num_workers": 0,
        "samples": 10,
        "batches": 2,
    }
    own, pairs = found["val"]["own"], found["val"]["pairs"]
    assert own["sampler"].endswith("Own") and own["shuffle"] is None and own["batch_size"] == 2
    assert pairs["batch_sampler"].endswith("Pairs") and (
        pairs["shuffle"],
        pairs["batch_size"],
        pairs["batches"],
    ) == (None, None, 2)


def test_of_plain_iterables_the_number_of_batches_is_recorded() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(batches(3))

    quiet(run_dir="run", logger=True, max_steps=2).fit(Net(), Stream(), batches(3))
    assert read()["data"] == {"train": {"batches": None}, "val": {"batches": 3}}


def test_a_dataset_whose_length_fails_ends_no_run() -> None:
    class Unsure(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(batches(2))

        def __len__(self) -> int:
            raise TypeError("unknown")

    quiet(run_dir="run", logger=True).fit(Net(), torch.utils.data.DataLoader(Unsure(), batch_size=None))
    assert read()["status"] == "completed" and read()["data"]["train"]["samples"] is None


def test_a_record_that_begins_with_a_checkpoint_has_the_settings() -> None:
    quiet(run_dir="run", max_epochs=2, hooks=[ModelCheckpoint()]).fit(Net(), batches())
    assert read()["settings"] and read()["data"] == {"train": {"batches": 4}}


def test_the_resolved_configuration_of_the_command_line_is_recorded_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        textwrap.dedent("""
        from hookline import DataModule
        from hookline.testing import TinyModule, tiny_batches

        class Data(DataModule):
            def train_dataloader(self):
                return tiny_batches()

        class Model(TinyModule):
            pass
    """)
    )
    (tmp_path / "run.toml").write_text(
        textwrap.dedent(f"""
        module = "parts.Model"
        datamodule = "parts.Data"
        allow = ["parts"]
        [trainer]
        max_epochs = 9
        run_dir = "run"
        [config]
        where = "https://user:{SECRET}@host/path?sig={SECRET}"
        [config.service]
        api_key = "{SECRET}"
        nested = [{{password = "{SECRET}", size = 3}}]
    """)
    )
    given = [
        "fit",
        "run.toml",
        "--trainer.max_epochs",
        "1",
        f"--config.token={SECRET}",
        "--config.width",
        "5",
    ]
    preloaded.run([sys.executable, "-m", "hookline", *given], cwd=tmp_path, check=True)
    record = json.loads((tmp_path / RECORD).read_text())
    assert SECRET not in (tmp_path / RECORD).read_text()
    assert record["command"].endswith(
        "fit run.toml --trainer.max_epochs 1 --config.token=... --config.width 5"
    )
    assert record["config"]["trainer"]["max_epochs"] == 1 and record["config"]["config"]["width"] == 5
    assert record["config"]["config"]["service"] == {
        "api_key": "(not shown)",
        "nested": [{"password": "(not shown)", "size": 3}],
    }
    assert record["config"]["config"]["where"] == "https://host/..."


def test_the_best_value_of_every_monitor_is_recorded() -> None:
    hooks = [ModelCheckpoint(monitor="val/loss"), EarlyStopping("val/loss", patience=9)]
    trainer = quiet(hooks=hooks, run_dir="run", logger=True, max_epochs=3)
    known: list[Any] = []  # a run that is killed early shows what it monitors
    trainer.on("train_start")(lambda: known.append(read()["monitors"]["early_stopping"]["metric"]))
    trainer.fit(Net(), batches(), batches())
    assert known == ["val/loss"]
    found = read()["monitors"]
    assert found["model_checkpoint"] == {
        "metric": "val/loss",
        "mode": "min",
        "best": hooks[0].best_model_score,
    }
    assert found["early_stopping"]["best"] == hooks[1].best_score
    assert read()["checkpoint"]["step"] == 12


# ---- what may go wrong -------------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_written_is_warned_of_once_and_ends_no_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    RECORD.mkdir(parents=True)
    trainer = quiet(run_dir="run", logger=True, max_epochs=3, hooks=[ModelCheckpoint()])
    trainer.fit(Net(), batches())
    assert trainer.status == "completed"
    said = [each.message for each in caplog.records if "run.json could not be written" in each.message]
    assert len(said) == 1 and "The run continues without it." in said[0]
    assert [each for each in os.listdir("run") if each.startswith(".run.json")] == []


def test_a_full_disk_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    write_text = Path.write_text

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        if self.name.startswith(".run.json"):
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    trainer = quiet(run_dir="run", logger=True)
    trainer.fit(Net(), batches())
    assert trainer.status == "completed" and "No space left on device" in caplog.text and not RECORD.exists()


def test_objects_of_the_user_cannot_break_it() -> None:
    class Odd(Hook):
        def __init__(self, value: Any = None) -> None:
            super().__init__()
            self.value = {
                "nan": float("nan"),
                "big": 10**6000,
                3: "\ud800",
                "text": "x" * 10**7,
                "many": list(range(10**5)),
            }
            self.value["self"] = self.value

        @property
        def watch(self) -> Any:
            raise RuntimeError("called")

    quiet(hooks=[Odd()], run_dir="run", logger=True).fit(Net(), batches())
    assert read()["status"] == "completed" and RECORD.stat().st_size < RECORD_BYTES


def test_a_huge_configuration_is_left_out_and_the_rest_stays_readable() -> None:
    trainer = quiet(run_dir="run", logger=True)
    trainer.resolved_config = {f"k{n}": {f"j{m}": "x" * 900 for m in range(50)} for n in range(400)}
    trainer.fit(Net(), batches())
    record = read()
    assert (
        record["config"] is None and record["status"] == "completed" and record["options"]["max_epochs"] == 1
    )


def test_a_mapping_that_raises_is_said_in_the_record() -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("on purpose")

    trainer = quiet(run_dir="run", logger=True)
    trainer.resolved_config = Broken(a=1)
    trainer.fit(Net(), batches())
    assert (read()["status"], read()["problem"]) == ("completed", "RuntimeError: on purpose")


def test_the_record_is_whole_at_any_moment() -> None:
    """A reader that looks all the time never finds half of it, or none."""
    code = (
        "import json, pathlib, sys, time\npath = pathlib.Path('run/run.json')\n"
        "while not path.exists(): time.sleep(0.001)\nprint('here', flush=True)\n"
        "while True:\n    if json.loads(path.read_text())['status'] == 'completed': break\nprint('end')"
    )
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        trainer = quiet(run_dir="run", logger=True, max_epochs=20)

        class Writes(Hook):
            def on_train_epoch_end(self, trainer: Any) -> None:
                for _ in range(10):
                    trainer._run.identity.record.write()

        trainer.add_hook(Writes())
        trainer.fit(Net(), batches())
        assert reader.communicate(timeout=60)[0].split() == ["here", "end"]
    finally:
        reader.kill()


def test_it_costs_little() -> None:
    """Not a benchmark: far from what a run would notice."""
    trainer = Trainer(run_dir="run", max_epochs=1, enable_progress_bar=False)
    trainer.fit(Net(), batches())
    began = time.process_time()
    for _ in range(100):
        trainer._fitted.identity.record.write()  # type: ignore[union-attr]
    assert time.process_time() - began < 2


# ---- a fit that is refused -----------------------------------------------------------------------------------------


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return []


def refuse(options: dict[str, Any], **arguments: Any) -> Trainer:
    trainer = quiet(**{"logger": True, "checkpoint": True, **options})
    with pytest.raises(HooklineError):
        trainer.fit(arguments.pop("module", NoOptimizer()), batches(), **arguments)
    return trainer


@pytest.mark.parametrize("options", [{}, {"run_dir": "named/deep"}], ids=["own", "named"])
def test_a_fit_that_is_refused_leaves_no_directory(options: dict[str, Any]) -> None:
    refuse(options)
    refuse(options, module=torch.nn.Linear(4, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    refuse(options, module=torch.nn.Linear(4, 2), loss=torch.nn.functional.mse_loss)
    assert [str(each) for each in Path().rglob("*") if str(each) != "runs"] == []
    trainer = quiet(logger=True, **options)
    trainer.fit(Net(), batches())
    assert len(list_runs(".").runs) == 1 and trainer.status == "completed"


@pytest.mark.parametrize("folder", ["", "deep/"], ids=["flat", "deep"])
def test_the_files_of_other_loggers_go_too(folder: str) -> None:
    pytest.importorskip("tensorboard")

    class Logs(Hook):
        def setup(self, experiment: Any) -> None:
            experiment.add_scalar("a", 1.0, 0)
            experiment.add_image("b", torch.zeros(1, 2, 2), 0)

    class NoLoss(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return "no loss"

    for queued in (True, False):
        loggers = [CSV(f"{folder}metrics.csv"), TensorBoard(f"{folder}events", queued=queued), JSONLines()]
        refuse({"run_dir": "run", "logger": loggers, "hooks": [Logs()]})
        refuse({"run_dir": "run", "logger": loggers}, module=NoLoss())
        assert not Path("run").exists()
    Path("run/events").mkdir(parents=True)
    kept = [Path("run/events/events.mine"), Path("run/hparams.csv"), Path("run/metrics.csv")]
    for path in kept:
        path.write_text("step\n1\n")
    refuse({"run_dir": "run", "logger": [TensorBoard("events"), CSV()]})
    assert sorted(path for path in Path("run").rglob("*") if path.is_file()) == sorted(kept)


def test_a_trainer_finds_its_run_again_after_a_fit_that_was_refused() -> None:
    trainer = quiet(logger=True, checkpoint=True)
    trainer.fit(Net(), batches())
    first = trainer.run_dir
    with pytest.raises(HooklineError):
        trainer.fit(NoOptimizer(), batches())
    trainer.max_epochs = 2
    trainer.fit(Net(), batches(), resume="auto")
    assert trainer.run_dir == first and trainer.global_step == 8
    assert os.listdir("runs") == [first.name]


def test_a_directory_with_files_keeps_them_as_they_were_when_a_fit_is_refused() -> None:
    Path("mine").mkdir()
    Path("mine/note.txt").write_text("kept")
    Path("mine/log.jsonl").write_text('{"type": "note"}\n')
    refuse({"run_dir": "mine"})
    assert sorted(os.listdir("mine")) == ["log.jsonl", "note.txt"]
    assert Path("mine/log.jsonl").read_text() == '{"type": "note"}\n'
    quiet(run_dir="run", logger=True, checkpoint=True).fit(Net(), batches())
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refuse({"run_dir": "run"})
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_fit_that_fails_in_code_of_the_user_before_training_is_recorded() -> None:
    class Broken(Net):
        def configure_optimizers(self) -> Any:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        quiet(run_dir="run", logger=True).fit(Broken(), batches())
    assert (read()["status"], read()["error"]["type"]) == ("error", "ValueError")
