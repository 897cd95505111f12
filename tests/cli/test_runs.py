"""`hookline fit`, `validate`, `test` and `predict`: what they print, write and return."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import sys
import time
from pathlib import Path

import preloaded
import pytest
from cli.configured import RUN, TRACED_RUN, hookline, said
from ranks.torchrun import by_torchrun

from hookline.checkpoint.files import read_manifest
from hookline.cli import main


@pytest.mark.usefixtures("in_traced_project")
def test_a_trace_is_written_into_the_runs_directory() -> None:
    records = json.loads(Path("run/trace.json").read_text())
    assert (
        sum(each["name"] == "on_step_end" and each["cat"] == "event" for each in records if "cat" in each)
        == 8
    )


@pytest.mark.usefixtures("in_traced_project")
def test_the_last_line_of_a_failed_run_is_the_command_that_continues(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = said(
        capsys, "fit", "fails.toml", "--trainer.default_root_dir", str(tmp_path), code=1
    ).splitlines()[-4:]
    assert lines.pop().startswith("Model: ")
    assert (
        lines[0]
        == "Failed: RuntimeError: broken on purpose, in hook 'fails', on_step_end, epoch 1, batch 1, step 6, rank 0."
    )
    assert lines[1].startswith(f"Saved: {tmp_path}/runs/") and lines[1].endswith(
        "/checkpoints/last, at step 6."
    )
    command = shlex.split(lines[2].removeprefix("To resume: "))
    assert command[:2] == ["hookline", "fit"] and "--checkpoint" in command
    assert "fit completed at step 8" in said(capsys, *command[1:], "--hooks.fails", "false")


@pytest.mark.usefixtures("in_traced_project")
def test_an_error_of_hookline_ends_with_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (Path("diverges.toml")).write_text(
        TRACED_RUN + "[hooks.model_checkpoint]\nevery_n_train_steps = 2\n[optimizer]\n"
        'class_path = "SGD"\nlr = 1e30\n'
    )
    lines = said(capsys, "fit", "diverges.toml", "--trainer.run_dir", "diverged", code=1).splitlines()
    assert lines[0].startswith("hookline: The loss")
    assert lines[-2].startswith("  Failed: NonFiniteLoss: ")
    assert lines[-1] == "  Nothing was saved, so there is nothing to resume from."


@pytest.mark.usefixtures("in_traced_project")
def test_in_a_process_of_its_own_nothing_comes_after_it() -> None:
    done = preloaded.run(
        [sys.executable, "-m", "hookline", "fit", "fails.toml", "--trainer.run_dir", "died"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    *_, resume, model = done.stderr.splitlines()
    assert resume == "To resume: hookline fit fails.toml --trainer.run_dir=died"
    assert "died/checkpoints/last" in model and model.startswith("Model: ")


@pytest.mark.usefixtures("in_traced_project")
def test_a_hook_that_ends_the_process_does_not_end_it_without_a_word() -> None:
    Path("quits.toml").write_text(
        Path("fails.toml").read_text().replace("trace_parts.Fails", "trace_parts.Quits")
    )
    done = preloaded.run(
        [
            sys.executable,
            "-m",
            "hookline",
            "fit",
            "quits.toml",
            "--trainer.run_dir=quit",
            "--hooks.fails.token=word",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 3
    *_, failed, saved, _, _, command = done.stderr.splitlines()
    assert failed.startswith("Failed: SystemExit: 3, in hook 'fails', on_step_end, epoch 1, batch 1, step 6")
    assert saved == "Saved: quit/checkpoints/last, at step 6."
    assert command == "Or: hookline fit quits.toml --trainer.run_dir=quit --hooks.fails.token=..."
    records = [json.loads(line) for line in Path("quit/log.jsonl").read_text().splitlines()]
    assert [each["exception"] for each in records if each["type"] == "failure"] == ["SystemExit"]


@pytest.mark.usefixtures("in_traced_project")
def test_a_job_of_several_ranks_is_resumed_as_one() -> None:
    done = by_torchrun(
        "-m", "hookline", "fit", "fails.toml", "--trainer.run_dir=both", "--trainer.max_epochs=5"
    )
    assert (
        "torchrun --standalone --nproc-per-node 2 -m hookline fit fails.toml --trainer.run_dir=both"
        in done.stderr
    )


def test_fit_with_overrides_in_a_process_of_its_own(project: Path, tmp_path: Path) -> None:
    done = hookline(
        "fit", project / "run.toml", "--trainer.max_epochs", "1", "--module.lr=0.2", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # one document and nothing else, whatever hooks print
    assert (told["status"], told["step"], told["epochs"]) == ("completed", 4, 1)
    assert set(told["metrics"]) == {"train/loss", "val/loss"}
    assert (tmp_path / told["run_dir"] / "log.jsonl").is_file()
    assert "the hook speaks" in done.stderr


def test_torchrun_starts_it_too(project: Path, tmp_path: Path) -> None:
    words = ("-m", "hookline", "fit", str(project / "run.toml"), "--trainer.max_epochs=1")
    done = by_torchrun(*words, ranks=1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fit completed at step 4" in done.stdout


def read_until(master: int, seconds: float, enough: str) -> str:
    text, end = "", time.monotonic() + seconds
    while enough not in text and time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                data = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            text += data.decode(errors="replace")
    return text


def test_ctrl_c_saves_the_run_leaves_a_clean_terminal_and_can_be_continued(
    project: Path, tmp_path: Path
) -> None:
    master, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "hookline",
        "fit",
        str(project / "run.toml"),
        "--trainer.max_epochs=100",
        "--hook=cli_parts.Slow",
        "--trainer.enable_progress_bar=true",
        "--trainer.min_epochs=3",
        "--trainer.run_dir=here",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "160"}
    process = preloaded.Popen(
        command, cwd=tmp_path, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    text = read_until(master, 120, "batch 3")
    process.send_signal(signal.SIGINT)
    text += read_until(master, 120, "To continue:")
    text += read_until(master, 120, "no such text")  # until the process closes its end
    assert process.wait(120) == 130, text
    os.close(master)
    assert "SIGINT: finishing this batch" in text
    assert "Traceback" not in text
    assert text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l")  # the cursor is back
    (saved,) = (tmp_path / "here" / "checkpoints").iterdir()
    again = text.replace("\r\n", "").partition("To continue: ")[2].partition("Model: ")[0]
    assert (
        "--trainer.run_dir=here" in again and "--checkpoint" not in again
    )  # a run with a name finds its newest by itself
    step = read_manifest(saved)["step"]
    assert (
        main(
            [
                "fit",
                str(project / "run.toml"),
                "--checkpoint",
                str(saved),
                "--trainer.max_steps",
                str(step + 2),
                "--trainer.max_epochs=100",
                "--trainer.run_dir=there",
            ]
        )
        == 0
    )


def test_the_end_of_a_run_is_told_in_words(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(project / "run.toml"), "--trainer.run_dir", "out"]) == 0
    said = capsys.readouterr().out
    assert "the hook speaks" in said
    assert "fit completed at step 8, 2 epochs: " in said
    assert "run directory: out" in said


def test_a_run_that_a_hook_stops_went_well(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(project / "run.toml"), "--hook", "cli_parts.Stops"]) == 0
    assert "fit stopped (enough) at step 1, in the first epoch" in capsys.readouterr().out


def test_a_run_that_fails_is_told_from_a_wrong_configuration(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(project / "run.toml"), "--hook", "cli_parts.Fails", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "RuntimeError: broken on purpose" in err
    assert "in on_step_end" in err  # the traceback
    error = json.loads(out)["error"]
    assert (error["type"], error["problem"]) == ("RuntimeError", "broken on purpose")
    assert any("at epoch 0" in note for note in error["notes"])


def test_a_wrong_configuration_is_told_without_a_traceback_and_for_programs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(project / "run.toml"), "--trainer.max_epocs", "3", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "Did you mean 'max_epochs'?" in err
    error = json.loads(out)["error"]
    assert (error["type"], error["key"], error["value"]) == ("ConfigError", "trainer.max_epocs", 3)


def test_only_the_person_at_the_command_line_can_allow_what_runs_commands(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "greedy.toml").write_text("allow = ['code']\n" + RUN)
    assert main(["fit", str(project / "greedy.toml")]) == 2
    assert "add --allow code" in capsys.readouterr().err
    hook = ["--hook", "code.InteractiveConsole"]
    assert main(["fit", str(project / "run.toml"), *hook]) == 2
    assert "may not be imported" in capsys.readouterr().err
    assert main(["fit", str(project / "run.toml"), *hook, "--allow", "code"]) == 2
    assert "is not a hook" in capsys.readouterr().err  # it was imported, and is something else


def test_a_fit_says_which_step_is_on_disk(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(project / "run.toml")
    keep = [
        "--hooks.keep.class_path",
        "hookline.hooks.model_checkpoint.ModelCheckpoint",
        "--hooks.keep.every_n_train_steps",
        "3",
    ]
    for _ in range(2):  # started again, it has the same to say
        assert main(["fit", config, "--trainer.run_dir", "trained", *keep]) == 0
        out = capsys.readouterr().out
        step = re.search(r"fit completed.* at step (\d+)", out)
        assert (
            step is not None
            and out.count("trained/checkpoints/last (step ") == 1
            and "checkpoint: " not in out
        )
        assert f"Model: trained/checkpoints/last (step {step[1]}). " in out
    assert main(["fit", config, "--trainer.run_dir", "trained", *keep, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["last_state_saved"] is True and said["checkpoint_step"] == said["step"] == int(step[1])
    for stage in ("validate", "predict"):
        trained = [stage, config, "--trainer.run_dir", "trained", "--checkpoint", "auto"]
        assert main([*trained, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["checkpoint"] == said["checkpoint"]
        assert main(trained) == 0
        assert f"checkpoint: {said['checkpoint']}\n" in capsys.readouterr().out
    assert main(["fit", config, "--trainer.run_dir", "lost", "--trainer.checkpoint=false"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Model: not saved, because of checkpoint=False."
    assert main(["fit", config, "--trainer.run_dir", "trial", "--trainer.fast_dev_run=true"]) == 0
    assert "checkpoint: none; nothing of this run is saved\n" in capsys.readouterr().out


def test_a_command_with_hidden_values_says_that_they_have_to_be_filled_in(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(project / "run.toml")
    end = ["--hook", "cli_parts.Ends", "--trainer.run_dir=ended"]
    assert (
        main(
            ["fit", config, *end, "--hooks.token.class_path=cli_parts.HasToken", "--hooks.token.api_key=word"]
        )
        == 143
    )
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("To continue")]
    assert (
        line.startswith("To continue (fill in the hidden value of --hooks.token.api_key): hookline fit ")
        and "word" not in line
    )
    assert "--hooks.token.api_key=..." in line
    assert main(["fit", config, *end, "--fresh"]) == 143
    assert "To continue: hookline fit " in capsys.readouterr().out


def test_the_last_line_of_a_fit_says_where_the_model_is_and_how_to_load_it(
    project: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        main(
            [
                "fit",
                str(project / "run.toml"),
                "--trainer.run_dir",
                "trained",
                "--trainer.enable_progress_bar=true",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == (
        f'Model: trained/checkpoints/last (step 8). Load it: import sys; sys.path.insert(0, "{project.as_posix()}"); '
        'from cli_parts import Net; model = Net.load_from_checkpoint("trained/checkpoints/last")'
    )
    assert "Model: " not in err  # once is enough
    assert main(["fit", str(project / "run.toml"), "--trainer.run_dir", "trained"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Model: trained/checkpoints/last (step 8). ")
    assert "Nothing to train" in caplog.text and "hookline fit --fresh" in caplog.text
    assert main(["fit", str(project / "run.toml"), "--trainer.run_dir", "trained", "--fresh"]) == 0
    assert "fit completed at step 8" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["checkpoint.write=async", "checkpoint=async", "save=async"])
@pytest.mark.parametrize(
    "more",
    [[], ["--trainer.checkpoint.every=2 minutes"], ["--trainer.checkpoint.last=false"]],
    ids=["", "every", "last"],
)
def test_how_to_save_is_a_table_or_a_word_and_has_an_older_name(
    project: Path, given: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["fit", str(project / "run.toml"), "--trainer.run_dir", "out", f"--trainer.{given}", *more])
    if more and not given.startswith("checkpoint.write"):  # two of them cannot be combined
        assert code == 2
        return
    assert code == 0
    assert Path("out/checkpoints/last").exists() is not (bool(more) and "last" in more[0])


def test_a_run_over_checkpoints_that_cannot_be_used_is_begun_anew_only_by_an_explicit_word(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["fit", str(project / "run.toml"), "--trainer.run_dir=out", "--hook", "model_checkpoint"]
    assert main(fit) == 0
    saved = list(Path("out/checkpoints").iterdir())
    for each in saved:
        (each / "model.safetensors").write_text("damaged")
    assert main(fit) == 1
    said = capsys.readouterr().err
    assert (
        "none of them can be used" in said and "--fresh" in said and all(str(each) in said for each in saved)
    )
    assert main([*fit, "--fresh"]) == 0
    assert "fit completed at step 8" in capsys.readouterr().out
    assert main([*fit, "--fresh", "--checkpoint", "auto"]) == 2
    assert "--fresh begins a new run and --checkpoint continues one" in capsys.readouterr().err


def test_fresh_takes_the_place_of_a_checkpoint_in_the_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "continues.toml").write_text("checkpoint = 'auto'\n" + RUN)
    fit = ["fit", str(project / "continues.toml"), "--trainer.run_dir=out", "--hook", "model_checkpoint"]
    assert main(fit) == 0
    assert main(fit) == 0
    assert main([*fit, "--fresh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["epochs"] == 2


def test_validate_test_and_predict_use_the_weights_of_a_checkpoint(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(project / "run.toml")
    keep = [
        "--hooks.keep.class_path",
        "hookline.hooks.model_checkpoint.ModelCheckpoint",
        "--hooks.keep.filename",
        "best",
    ]
    assert main(["fit", config, "--trainer.run_dir", "trained", "--json", *keep]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["checkpoint"].startswith("trained/checkpoints/")

    def measured(*arguments: str) -> dict[str, float]:
        assert main([*arguments, "--json", "--trainer.seed=7"]) == 0
        return json.loads(capsys.readouterr().out)["metrics"]

    assert measured("validate", config, "--checkpoint", trained["checkpoint"])["val/loss"] == pytest.approx(
        trained["metrics"]["val/loss"]
    )
    assert measured("validate", config)["val/loss"] > 2 * trained["metrics"]["val/loss"]
    assert measured("test", config, "--checkpoint", trained["checkpoint"])["test/loss"] == pytest.approx(
        trained["metrics"]["val/loss"]
    )
    assert (
        main(["predict", config, "--checkpoint", trained["checkpoint"], "--trainer.run_dir", "predicted"])
        == 0
    )
    lines = [json.loads(line) for line in Path("predicted/predictions.jsonl").read_text().splitlines()]
    assert [len(each) for each in lines] == [2, 2, 2, 2]


def test_a_stage_with_initial_weights_warns_if_the_run_directory_has_trained_ones(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = [str(project / "run.toml"), "--trainer.run_dir", "trained"]
    assert main(["validate", *config]) == 0
    assert "WARNING" not in capsys.readouterr().err  # there are no checkpoints yet
    said(capsys, "fit", *config)
    for stage in ("validate", "test", "predict"):
        assert main([stage, *config, "--json"]) == 0
        printed = capsys.readouterr()
        assert f"WARNING: {stage} uses the initial weights" in printed.err
        assert "trained has checkpoints" in printed.err and "--checkpoint best" in printed.err
        assert json.loads(printed.out)["status"] == "completed"
    for chosen in ("auto", "false"):
        assert main(["validate", *config, "--checkpoint", chosen]) == 0
        assert "WARNING" not in capsys.readouterr().err


def test_a_pruned_run_is_not_a_failure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prunes = ["--hooks.prunes.class_path", "cli_parts.Prunes", "--trainer.run_dir", "pruned"]
    assert "fit pruned (not promising) at step 1" in said(capsys, "fit", str(project / "run.toml"), *prunes)
    assert [each.split()[:2] for each in said(capsys, "runs", "pruned").splitlines()[1:]] == [
        ["pruned", "pruned"]
    ]
