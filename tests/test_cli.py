"""The command line, as people and programs use it: mostly in this process, a few times for real."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline import EVENTS
from hookline.checkpoint.files import read_manifest
from hookline.cli import CODES, main, make_parser
from hookline.registry import BUILTIN_HOOKS

PARTS = """
import os
import signal
import time
import torch
from torch.nn import functional as F
from hookline import DataModule, Hook, Module

class Net(Module):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(4, 2), lr
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx): return self.training_step(batch, batch_idx)
    test_step = validation_step
    def forward(self, x): return self.layer(x)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=self.lr)

class Data(DataModule):
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * 4
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

class Speaking(Hook):
    def on_train_start(self): print("the hook speaks")

class Slow(Hook):
    def on_train_batch_end(self, batches_seen):
        print("batch", batches_seen, flush=True)
        time.sleep(0.1)

class Fails(Hook):
    def on_step_end(self, step): raise RuntimeError("broken on purpose")

class Stops(Hook):
    def on_step_end(self, trainer): trainer.stop("enough")

class Ends(Hook):
    def on_step_end(self): os.kill(os.getpid(), signal.SIGTERM)

class HasToken(Hook):
    def __init__(self, api_key: str) -> None: self.api_key = api_key
"""
RUN = """
module = "cli_parts.Net"
datamodule = "cli_parts.Data"
[trainer]
max_epochs = 2
seed = 1
enable_progress_bar = false
[hooks.speaking]
class_path = "cli_parts.Speaking"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "cli_parts.py").write_text(PARTS)
    (folder / "run.toml").write_text(RUN)
    path = list(sys.path)
    yield folder
    sys.path[:] = path
    sys.modules.pop("cli_parts", None)


def hookline(
    *arguments: str | Path, cwd: Path | None = None, start: tuple[str, ...] = ("-m", "hookline")
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONWARNINGS": "error",
    }
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


# ---- for real ----------------------------------------------------------------------------------------------------


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


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[")
    (tmp_path / "unknown.toml").write_text("modul = 'x.Y'")
    (tmp_path / "hook.toml").write_text("module = 'x.Y'\nhooks = ['progres_bar']")
    commands = [
        ["--help"],
        ["fit", "--help"],
        ["--version"],
        ["events"],
        ["events", "step_end"],
        ["hooks"],
        ["hooks", "--json"],
        ["new", "project"],
        ["fit", "missing.toml"],
        ["fit", "broken.toml"],
        ["fit", "unknown.toml"],
        ["fit", "hook.toml"],
        ["fit", "unknown.toml", "--a"],
    ]
    code = f"""
import sys
from hookline.cli import main
codes = []
for command in {commands!r}:
    try:
        codes.append(main(command))
    except SystemExit as end:
        codes.append(end.code)
print(codes, [name for name in ("torch", "numpy", "jsonargparse", "rich") if name in sys.modules])
"""
    done = hookline(cwd=tmp_path, start=("-c", code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2] []"
    assert "usage: hookline" in done.stdout


def test_torchrun_starts_it_too(project: Path, tmp_path: Path) -> None:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "hookline")
    done = hookline("fit", project / "run.toml", "--trainer.max_epochs=1", cwd=tmp_path, start=start)
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
    process = subprocess.Popen(
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


# ---- in this process ---------------------------------------------------------------------------------------------


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
    assert any("fit at epoch 0" in note for note in error["notes"])


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


def test_explain_shows_the_listeners_and_runs_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(project / "run.toml")]) == 0
    said = capsys.readouterr().out
    assert "hook speaking: Speaking.on_train_start" in said
    assert "on_gradient_clip" not in said
    assert "the hook speaks" not in said
    assert main(["explain", str(project / "run.toml"), "--all"]) == 0
    assert "on_gradient_clip" in capsys.readouterr().out
    assert main(["explain", str(project / "run.toml"), "--verb", "test", "--json"]) == 0
    assert "on_test_end" in {each["event"] for each in json.loads(capsys.readouterr().out)}
    assert not Path("runs").exists()


def test_hooks_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(BUILTIN_HOOKS) <= {each["name"] for each in listed}
    assert all(each["doc"] for each in listed)
    assert main(["hooks", "progress_bar", "--json"]) == 0
    bar = json.loads(capsys.readouterr().out)
    assert {"name": "refresh", "type": "a number", "required": False, "default": 0.25} in bar["parameters"]
    assert "on_train_batch_end" in bar["events"]
    assert main(["hooks", "progress_bar"]) == 0
    assert "refresh" in capsys.readouterr().out
    assert main(["hooks", "progres_bar"]) != 0
    assert "Did you mean 'progress_bar'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", BUILTIN_HOOKS)
def test_every_built_in_hook_can_be_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", name]) == 0
    said = capsys.readouterr().out
    assert name in said and "Parameters:" in said
    listed = said.partition("Parameters:")[2].partition("Listens to")[0]
    assert not re.search(r"\bAny\b|class_path|null|\)\s+\(|typing", listed), listed


def test_a_hooks_events_come_in_the_order_of_a_run_and_what_it_needs_is_in_the_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["hooks", "webhook"]) == 0
    said = capsys.readouterr().out
    events = re.findall(r"\w+", said.partition("Listens to")[2].partition(".")[0])
    assert events == [each.name for each in EVENTS if each.name in events] and events[0] == "setup"
    assert "  url = ...  # text\n" in said + "\n" and "text; required" in said
    assert main(["hooks", "lr_schedule"]) == 0
    assert "  **options     further arguments, by name\n" in capsys.readouterr().out


def test_events_are_those_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == [each.name for each in EVENTS]
    assert main(["events", "train_batch_end"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("on_train_batch_end: ")
    assert "dataloader_idx" in said
    assert main(["events", "train_batch_edn"]) != 0
    assert "Did you mean" in capsys.readouterr().err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["module"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fitt"], "invalid choice: 'fitt'"),
        (["fit"], "CONFIG"),
        (["fit", "run.toml", "--max_epochs", "3"], "This is an option of the trainer: --trainer.max_epochs"),
        (["events", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_a_wrong_command_is_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_exit_code_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from hookline.cli import codes

    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name in ("OK", "FAILED", "USAGE", "INTERRUPTED", "BROKEN_PIPE"):
        assert f"{getattr(codes, name)} " in said


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m hookline events --json; echo code $? >&2"
    done = subprocess.run(["bash", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    assert "code 141" in done.stderr


def test_a_wrong_name_is_a_wrong_command() -> None:
    assert main(["hooks", "early_stoping"]) == 2
    assert main(["events", "nope"]) == 2


def test_the_page_on_the_command_line_names_every_command_and_exit_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    commands = next(
        action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ).choices
    assert [name for name in commands if not re.search(rf"`(?:hookline )?{name}[ `]", page)] == []
    codes = {code for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(", ")}
    assert codes == set(re.findall(r"\b\d+\b", CODES))


def test_the_list_of_hooks_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--json"]) == 0
    assert [
        each["name"]
        for each in json.loads(capsys.readouterr().out)
        if each["builtin"] and not each["doc"].endswith(".")
    ] == []
