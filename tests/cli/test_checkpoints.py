"""`hookline checkpoint show | verify`, as people and programs use it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import Hook
from hookline.cli import main
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging
from hookline.report.runs import list_runs


class Rich(Net):
    """With tied weights and a type that safetensors has no name for."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 2, bias=False)
        self.twin.weight = self.layer.weight
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))


@pytest.fixture
def net() -> Net:
    """Trained into `run`, with three checkpoints."""
    net = Rich()
    hooks = [
        ModelCheckpoint(
            monitor="val/loss",
            save_top_k=2,
            save_last=True,
            filename="{epoch}",
            auto_insert_metric_name=False,
        ),
        WeightAveraging(decay=0.5),
    ]
    quiet(run_dir="run", max_epochs=2, hooks=hooks).fit(net, batches(), batches())
    return net


@pytest.fixture
def bucket(memory_urls: None) -> str:
    return "memory://shown"


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(["checkpoint", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def damage(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


# ---- show --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_told_in_words(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", "run/checkpoints/1", "--tensors"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run/checkpoints/1\n")
    assert "step 8, epoch 1, " in said and "8 batches" in said
    assert "reason: best" in said and "UTC" in said
    assert "kept for    val/loss " in said and "(min is better)" in said
    assert "train/loss " in said and f"torch {torch.__version__}" in said and "world size  1" in said
    assert "weights     4 tensors, 13 numbers, buffers included; tied: twin.weight = layer.weight" in said
    assert "weight_averaging, model_checkpoint" in said
    assert "model.safetensors " in said and "state.json " in said
    lines = [line.split() for line in said.splitlines()]
    assert ["layer.weight", "float32", "[2,", "4]"] in lines and ["phase", "complex64", "[3]"] in lines


def test_a_checkpoint_is_told_to_programs(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "show", "run/checkpoints/last", "--tensors")
    manifest = json.loads(Path("run/checkpoints/last/manifest.json").read_text())
    assert manifest.items() <= data.items()
    assert (data["tensors"], data["numbers"]) == (4, 13)
    assert {each["name"]: each["stored"] for each in data["tensors_by_name"]}["twin.weight"] == "layer.weight"
    assert "tensors_by_name" not in told(capsys, "show", "run/checkpoints/last")


def test_a_run_is_a_table_of_its_checkpoints_with_what_is_wrong(
    net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    damage("run/checkpoints/last/model.safetensors")
    assert main(["checkpoint", "show", "run"]) == 0
    first, missing, _, last, newest, older = capsys.readouterr().out.splitlines()
    assert missing.startswith(
        "Its last state is not on disk: it was completed at step 8, but its newest checkpoint is of step 8 before"
    )
    assert first.startswith("run: run ") and first.endswith(", completed at step 8")
    assert last.split()[:4] == ["checkpoints/last", "8", "1", "last"]
    assert last.endswith("damaged: model.safetensors does not match the manifest (its sha256 differs).")
    assert newest.split()[:5] == ["checkpoints/1", "8", "1", "best", "val/loss"]
    assert newest.endswith('whole, resume="auto", resume="best"')  # what fit would take now
    assert older.split()[0] == "checkpoints/0" and older.endswith("whole")
    Path("run/checkpoints/0/manifest.json").unlink()
    rows = told(capsys, "show", "run")["checkpoints"]
    assert [(each["path"].rpartition("/")[2], each["whole"], each["step"]) for each in rows] == [
        ("last", False, 8),
        ("1", True, 8),
        ("0", False, None),
    ]
    assert "no manifest.json" in rows[2]["problem"]


def test_a_run_whose_last_state_is_not_on_disk_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(run_dir="run", hooks=[ModelCheckpoint(every_n_train_steps=3)], checkpoint=True).fit(
        Net(), batches(4)
    )
    assert told(capsys, "show", "run")["unsaved"] == ""
    shutil.rmtree("run/checkpoints/last")
    missing = "completed at step 4, but its newest checkpoint is of step 3"
    assert told(capsys, "show", "run")["unsaved"] == missing
    assert main(["checkpoint", "show", "run"]) == 0
    assert f"Its last state is not on disk: it was {missing}." in capsys.readouterr().out
    assert main(["checkpoint", "export", "run", "net.safetensors"]) == 0
    assert "(step 3)" in capsys.readouterr().out


def test_how_a_run_stands_is_said_in_the_words_of_the_list_of_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Fails(Hook):
        def on_step_end(self, step: int) -> None:
            if step == 3:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        quiet(run_dir="run", hooks=[ModelCheckpoint(every_n_train_steps=2), Fails()]).fit(Net(), batches(4))
    assert main(["checkpoint", "show", "run"]) == 0
    assert "failed at step 3" in capsys.readouterr().out.splitlines()[0]
    record = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(
        json.dumps({**record, "status": "training", "noted_at": "2020-01-01T00:00:00+00:00"})
    )
    for path in Path("run").glob("run.lock"):
        path.unlink()
    assert main(["checkpoint", "show", "run"]) == 0
    assert (
        "killed? at step 3" in capsys.readouterr().out.splitlines()[0]
    )  # without a lock it cannot be certain
    assert [(each.status, each.is_certain) for each in list_runs("run").runs] == [("killed", False)]
    run = told(capsys, "show", "run")["run"]
    assert (run["status"], run["is_certain"]) == ("killed", False)


def test_what_resume_takes_is_what_the_table_says(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {
        word: each["path"] for each in told(capsys, "show", "run")["checkpoints"] for word in each["resume"]
    }
    for word in ("auto", "best"):
        trainer = quiet(run_dir="run", max_epochs=3)
        taken: list[Path] = []
        trainer.on("checkpoint_load")(lambda path, taken=taken: taken.append(path))
        trainer.on("train_start")(lambda trainer: trainer.stop("seen"))
        trainer.fit(Rich(), batches(), resume=word)
        assert [str(each) for each in taken] == [shown[word]]


def test_a_url_is_shown_as_well(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    for name in ("old", "new"):
        trainer.save_checkpoint(f"{bucket}/run/{name}")
    data = told(capsys, "show", f"{bucket}/run/new", "--tensors")
    assert data["step"] == 1 and [each["name"] for each in data["tensors_by_name"]] == [
        "layer.weight",
        "layer.bias",
    ]
    assert main(["checkpoint", "show", bucket]) == 0
    _, new, old = capsys.readouterr().out.splitlines()
    assert new.startswith("run/new") and new.endswith("not verified") and old.startswith("run/old")
    assert main(["checkpoint", "show", f"{bucket}/nowhere"]) == 1
    assert "There is no checkpoint at memory://shown/nowhere or below it" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_show_does_not_make_things_up_about_a_damaged_checkpoint(
    net: Net, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/checkpoints/last", file).write_bytes(b"{}")
    assert main(["checkpoint", "show", "run/checkpoints/last"]) == 1
    assert f"run/checkpoints/last is damaged: {file}" in capsys.readouterr().err
    Path("run/checkpoints/last", file).unlink()
    assert main(["checkpoint", "show", "run/checkpoints/last"]) == 1
    assert f"damaged: {file} is missing" in capsys.readouterr().err


# ---- verify ------------------------------------------------------------------------------------------------------


def test_verify_reads_every_file_of_a_run_and_fails_if_one_is_damaged(
    net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "verify", "run"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"whole  run/checkpoints/{name}" for name in ("0", "1", "last")
    ]
    damage("run/checkpoints/1/state.safetensors")
    assert main(["checkpoint", "verify", "run/checkpoints/0", "run/checkpoints/1"]) == 1
    whole, wrong = capsys.readouterr().out.splitlines()
    assert whole == "whole  run/checkpoints/0"
    assert wrong.startswith(
        "wrong  The checkpoint run/checkpoints/1 is damaged: state.safetensors does not match the manifest"
    )
    rows = told(capsys, "verify", "run", "nowhere", code=1)
    assert [each["path"] for each in rows if not each["whole"]] == ["run/checkpoints/1", "nowhere"]
    assert "nowhere does not exist" in rows[-1]["problem"]


def test_verify_fetches_what_lies_at_a_url(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    trainer.save_checkpoint(f"{bucket}/made")
    assert told(capsys, "verify", bucket) == [
        {"path": f"{bucket}/made", "whole": True, "problem": None, "extra": []}
    ]
    fsspec.filesystem("memory").pipe_file("/shown/made/state.json", b"{}")
    (row,) = told(capsys, "verify", bucket, code=1)
    assert "memory://shown/made is damaged: state.json has 2 bytes" in row["problem"]


# ---- wrong paths, and help ---------------------------------------------------------------------------------------


def test_a_wrong_path_is_told_with_the_nearest_and_what_there_is(
    net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", "run/checkpoints/lats"]) == 1
    said = capsys.readouterr().err
    assert (
        "run/checkpoints/lats does not exist. Did you mean 'last'? run/checkpoints has: 0, 1, last." in said
    )
    assert main(["checkpoint", "show", "run/checkpoints/last/state.json"]) == 1
    assert (
        "is a file, but a checkpoint is a directory. `hookline checkpoint import run/checkpoints/last/state.json`"
        in capsys.readouterr().err
    )
    Path("bare").mkdir()
    assert main(["checkpoint", "show", "bare", "--json"]) == 1
    out, err = capsys.readouterr()
    assert (
        "There is no checkpoint in bare or below it. A fit writes checkpoints/last" in err
        and json.loads(out)["error"]["type"] == "CheckpointError"
    )


@pytest.mark.parametrize(
    "arguments", [["checkpoint", "--help"], ["checkpoint", "export", "--help"], ["checkpoint", "sho"]]
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = f"import sys\nfrom hookline.cli import main\ntry: main({arguments!r})\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert "export" in done.stdout + done.stderr
