"""The examples run, learn and show what they promise, in a shorter form than their READMEs say. Those that need other
packages are in tests/interop/test_examples.py, and the GPT in tests/test_examples.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import preloaded
import pytest
import torch
from ranks.torchrun import torchrun
from safetensors.torch import load_file
from test_dev import loaded

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(each.name for each in EXAMPLES.iterdir() if each.is_dir())


def run(folder: Path, program: str, *options: str, code: int = 0) -> str:
    """Run a program of an example in a folder with nothing but a copy of it; return what it printed."""
    name, file = program.split("/")
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    done = preloaded.run(
        [sys.executable, file, *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == code, done.stderr
    output: str = done.stdout
    return output


def number(pattern: str, output: str) -> float:
    """The last number that the output has at the group of this pattern."""
    found = re.findall(pattern, output)
    assert found, output
    return float(found[-1])


def test_a_gan_moves_its_points_to_the_data(tmp_path: Path) -> None:
    output = run(tmp_path, "gan/gan.py", "--batches", "500")
    assert number(r"distance ([\d.]+)", output) < 0.6  # 0.8 and more before the training


def test_both_tasks_of_a_mixture_are_learned(tmp_path: Path) -> None:
    output = run(tmp_path, "multi_task/multi_task.py", "--epochs", "1")
    assert "inside inside distance" in output
    assert number(r"inside: accuracy ([\d.]+)", output) > 0.9  # 0.8 are outside the circle
    assert number(r"distance: mean error ([\d.]+)", output) < 0.3
    assert number(r"from `distance`: ([\d.]+)", output) == pytest.approx(1 / 3, abs=0.002)


def test_ddp_and_fsdp_give_the_same_loss_and_fsdp_shards_the_weights(tmp_path: Path) -> None:
    source = (EXAMPLES / "distributed" / "distributed.py").read_text()
    losses = []
    for strategy, share in (("ddp", "100%"), ("fsdp", "50%")):
        done = torchrun(source, tmp_path, "--strategy", strategy, "--epochs", "1")
        assert done.code == 0, done.output
        assert done.lines("rank ") == [f"{rank} of 2 holds {share} of the weights" for rank in range(2)]
        losses.append(number(r"validation loss ([\d.]+)", done.output))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] < 2  # the variance of the targets is 4


def test_a_killed_stream_is_resumed_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    options = ("--steps", "24", "--save-every", "10")
    run(tmp_path, "streaming/streaming.py", *options, "--run-dir", "whole")
    run(tmp_path, "streaming/streaming.py", *options, "--run-dir", "killed", "--kill-at", "15", code=-9)
    output = run(tmp_path, "streaming/streaming.py", *options, "--run-dir", "killed")
    assert "resumed at step 10" in output
    whole, killed = (
        load_file(tmp_path / each / "checkpoints/last/model.safetensors") for each in ("whole", "killed")
    )
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_a_loop_written_by_hand_is_stopped_by_a_hook_and_its_best_checkpoint_loads(tmp_path: Path) -> None:
    output = run(tmp_path, "own_loop/own_loop.py")
    assert "stopped after" in output
    assert number(r"step +\d+ +loss [\d.]+ +gradient norm ([\d.]+)", output) > 0
    assert number(r"test accuracy of the best checkpoint: ([\d.]+)", output) > 0.95


def test_declared_events_of_a_loop_reach_hooks_and_the_policy_learns(tmp_path: Path) -> None:
    output = run(tmp_path, "reinforcement_learning/cart_pole.py", "--updates", "21")
    assert re.findall(r"update +(\d+)", output) == ["10", "20"]
    assert number(r"mean return +([\d.]+)", output) > 50  # 22 before the training


def test_a_study_prunes_trials_and_finds_a_good_one(tmp_path: Path) -> None:
    output = run(tmp_path, "optuna_study/optuna_study.py", "--trials", "5", "--epochs", "3")
    assert len(re.findall(r"complete after  3 epochs", output)) >= 3
    assert "pruned   after  2 epochs" in output
    assert number(r"best: .*validation loss ([\d.]+)", output) < 0.2  # the variance of the targets is 1.3


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_has_commands_of_files_that_exist_and_their_output(name: str) -> None:
    text = (EXAMPLES / name / "README.md").read_text()
    examples = loaded("tools/examples.py")
    for words in examples.commands(EXAMPLES / name / "README.md"):
        programs = [each for each in words if each.startswith(f"examples/{name}/")]
        assert programs and all((ROOT / each).is_file() for each in programs)
    output = re.search(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert output is not None and output[1].strip()
    assert f"({name}/README.md)" in (EXAMPLES / "README.md").read_text()


def test_the_tool_reports_examples_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = loaded("tools/examples.py")
    for name, program in (("right", "print('fine')"), ("wrong", "raise SystemExit('this broke')")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "it.py").write_text(program)
        (tmp_path / name / "README.md").write_text(
            f"# It\n```sh\npython examples/{name}/it.py  # runs it\n```\n"
        )
    examples.EXAMPLES = tmp_path
    assert examples.names(tmp_path) == ["right", "wrong"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "names", lambda: ["right", "wrong"])
        assert examples.main(["right"]) == 0
        assert examples.main([]) == 1
        printed = capsys.readouterr().out
        assert [line.split()[:2] for line in printed.splitlines() if " s   " in line] == [
            ["passed", "right"],
            ["passed", "right"],
            ["FAILED", "wrong"],
        ]
        assert "this broke" in printed
        assert examples.main(["wrnog"]) == 2
