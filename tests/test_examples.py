"""The demo is what a newcomer sees first and copies from: it must run, learn, and show what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

GPT = Path(__file__).parents[1] / "examples" / "gpt" / "gpt.toml"


STRICT = "import runpy, warnings; warnings.simplefilter('error'); runpy.run_module('hookline', run_name='__main__', alter_sys=True)"
"""As `python -W error -m hookline`, in a process that has imported torch already."""


def run_demo(folder: Path, *arguments: str, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the demo; anew: in a process that begins from nothing, as a newcomer does."""
    # one thread: two of them wait for each other on a busy machine, and so small a run gains nothing from them
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    # a sixth of the validation data shows the same
    words = ["fit", str(GPT), "--trainer.limit_val_batches=6", *arguments]
    start: Any = subprocess.run if anew else preloaded.run
    options = ["-W", "error", "-m", "hookline"] if anew else ["-c", STRICT]
    done: subprocess.CompletedProcess[str] = start(
        [sys.executable, *options, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=550,
    )
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    words = ("--datamodule.steps", "50", "--trainer.run_dir", "short", "--trainer.seed", "3")
    done = run_demo(folder, *words)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def output(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout


def records(folder: Path) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in (folder / "short" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def logged(folder: Path, name: str) -> dict[object, float]:
    """The first value of a metric at each step."""
    found: dict[object, float] = {}
    for record in records(folder):
        if record["type"] == "metrics" and name in record["metrics"]:
            found.setdefault(record["step"], record["metrics"][name])
    return found


def test_the_validation_loss_falls_below_what_letter_frequencies_give(output: str) -> None:
    losses = [
        float(each) for each in re.findall(r"^step +\d+ +validation loss ([\d.]+)$", output, re.MULTILINE)
    ]
    final = re.search(r"Validation loss ([\d.]+) nats per character.*?: ([\d.]+)$", output, re.MULTILINE)
    assert final is not None
    loss, entropy = float(final[1]), float(final[2])
    assert len(losses) == 5
    assert loss == losses[-1] < losses[0]
    assert 3 < entropy < 3.5
    assert loss < 0.95 * entropy  # 800 steps get below half of it


def test_a_sample_is_written_that_continues_from_the_prompt(output: str) -> None:
    sample = re.search(r"--- what it writes now ---\n(.*)\n---\n", output, re.DOTALL)
    assert sample is not None
    assert sample[1].startswith("The ")
    assert len(sample[1]) == len("The ") + 400


def test_the_gradient_hook_names_a_layer_every_50_steps(output: str, folder: Path) -> None:
    (told,) = re.findall(r"^step +(\d+) +largest gradient: ([\w.]+)$", output, re.MULTILINE)
    assert told[0] == "50"
    assert told[1].split(".")[0] in {"character", "position", "blocks", "head"}
    assert list(logged(folder, "grad_norm")) == [50]


def test_a_table_shows_what_the_hooks_cost_and_the_log_has_all_of_it(
    done: subprocess.CompletedProcess[str], folder: Path
) -> None:
    table = done.stderr.partition("Hooks took")[2].splitlines()
    assert table[1].split() == ["hook", "event", "calls", "total", "mean", "worst", "share"]
    assert ["report", "on_train_end", "1"] in [line.split()[:3] for line in table]  # it writes a sample
    (cost,) = [each for each in records(folder) if each["type"] == "cost"]
    rows = {(row["hook"], row["event"], row["calls"]) for row in cost["rows"]}  # type: ignore[attr-defined]
    assert {
        ("watch_gradients", "on_step_end", 1),
        ("report", "on_validation_end", 6),
        ("progress_bar", "on_train_batch_end", 50),
    } <= rows


def test_the_log_it_points_to_can_be_read_and_shows_warmup_and_decay(output: str, folder: Path) -> None:
    path = re.search(r"^The log of this run: (.+)$", output, re.MULTILINE)
    assert path is not None
    assert (folder / path[1]).samefile(folder / "short" / "log.jsonl")
    assert list(logged(folder, "val/loss")) == [10, 20, 30, 40, 50]
    rates, losses = logged(folder, "lr"), logged(folder, "train/loss")
    assert list(rates) == list(losses) == [10, 20, 30, 40, 50]
    assert rates[10] == max(rates.values())
    assert rates[50] == min(rates.values()) < 0.2 * rates[10]
    assert losses[50] < losses[10]


def test_nothing_is_written_outside_the_run_directory(output: str, folder: Path) -> None:
    assert [each.name for each in folder.iterdir()] == ["short"]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    first, second = (  # which hash strings differently
        run_demo(tmp_path, "--datamodule.steps", "1", anew=anew).stdout.split("The log of this run")[0]
        for anew in (True, False)
    )
    assert "what it writes now" in first
    assert first == second


def test_a_wrong_option_is_explained(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--datamodule.step", "5")
    assert done.returncode == 2
    assert "Did you mean 'steps'?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_cut_short_before_its_first_validation_ends_well(tmp_path: Path) -> None:
    done = run_demo(
        tmp_path,
        "--trainer.max_steps",
        "1",
        "--trainer.num_sanity_val_steps",
        "0",
        "--trainer.run_dir",
        "cut",
    )
    assert done.returncode == 0, done.stderr
    assert "fit completed at step 1" in done.stdout + done.stderr
