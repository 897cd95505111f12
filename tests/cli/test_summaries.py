"""`hookline runs`, `summary` and `report`: what the lists, summaries and pages say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from dialects.looped import net_and_sgd, train
from report.reported import evaluation_row, metrics, recorded, trained, written
from tiny import Net, batches, quiet

from hookline import Line, OptionError
from hookline.cli import main
from hookline.hooks import HParams, ModelCheckpoint
from hookline.report.runs import list_runs
from hookline.report.summary import summarize


def about(*runs: Path | str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = summarize(list(runs))["runs"]
    return found


def test_the_text_says_it_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trained("a", epochs=5, hooks=[ModelCheckpoint(monitor="val/loss")])
    Path("a").mkdir()  # another folder of the same name hides no run
    assert main(["summary", "a"]) == 0  # a name in runs/
    text = capsys.readouterr().out
    assert text.startswith("runs/a\n  status       completed, step 20, 5 epochs\n")
    assert "(lower is better)" in text and "runs/a/checkpoints/" in text
    assert "train/loss (epoch)" in text and "train/loss (step)" in text and "0.1 to 0.1" in text
    assert (
        "module.lr " in text and "trainer.hang_action" not in text
    )  # options that have their default are not listed


def test_the_time_is_one_line_with_shares_and_says_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    path = trained("a")
    with (path / "log.jsonl").open("a") as file:
        parts = {
            "training": 1.0,
            "data": 0.5,
            "validation": 0.25,
            "saving": 0.25,
            "forward": 0.5,
            "backward": 0.25,
            "optimizer": 0.125,
        }
        file.write(
            json.dumps(
                {"type": "timings", "time": 1.0, "step": 8, "total": 2.0, "sampled_batches": 20, **parts}
            )
            + "\n"
        )
    assert main(["summary", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"(under 1|[\d.]+) s in all, set-up included", text)
    assert (
        "training loop of the newest session: 2.0 s = 50% training (forward 25%, backward 12%, optimizer 6%), 25% waiting for data"
        in text
    )


def test_settings_are_listed_once_and_without_internal_hooks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_parts.py").write_text(
        "from hookline import DataModule\nfrom hookline.testing import TinyModule, tiny_batches\n\n\n"
        "class Data(DataModule):\n    def train_dataloader(self):\n        return tiny_batches()\n\n\nclass Model(TinyModule):\n    pass\n"
    )
    (tmp_path / "run.toml").write_text(
        'module = "own_parts.Model"\ndatamodule = "own_parts.Data"\nallow = ["own_parts"]\n[trainer]\nmax_epochs = 1\nseed = 3\n'
        'run_dir = "run"\n[hooks.model_checkpoint]\nfilename = "at_{step}"\n'
    )
    preloaded.run([sys.executable, "-m", "hookline", "fit", "run.toml"], cwd=tmp_path, check=True)
    settings = about(tmp_path / "run")[0]["settings"]
    assert settings["trainer.seed"] == 3 and not [
        key for key in settings if key.startswith(("config.trainer.", "hooks.cli"))
    ]
    assert settings["hooks.model_checkpoint.filename"] == "at_{step}"


def test_several_runs_are_compared_by_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        trained(f"lr-{lr}", lr=lr, epochs=3, seed=seed) for lr, seed in ((0.001, 0), (0.05, 0), (0.02, 1))
    ]
    data = summarize(list(paths))
    assert data["metric"] == "val/loss"
    assert [(each["key"], each["values"]) for each in data["differences"]] == [
        ("module.lr", [0.001, 0.05, 0.02]),
        ("trainer.seed", [0, 0, 1]),
    ]
    assert main(["summary", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "status", "step", "best", "val/loss", "lr", "seed"]
    best = [float(line.split()[3]) for line in lines[1:]]
    assert best == sorted(best) and {line.split()[4] for line in lines[1:]} == {"0.001", "0.05", "0.02"}


def test_equal_runs_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = trained("a"), trained("b")
    assert summarize([first, second])["differences"] == []
    assert main(["summary", str(first), str(second)]) == 0
    assert "All settings that are known are the same." in capsys.readouterr().out


def test_runs_of_hand_written_loops_without_settings_say_how_to_record_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compare(*hooks: Any) -> str:
        for folder, lr in (("a", 0.1), ("b", 0.2)):
            net, sgd = net_and_sgd(lr)
            line = Line(net, sgd, hooks=[each(lr) for each in hooks], logger=True, run_dir=folder)
            train(line, net, sgd, batches(2))
        assert main(["summary", "a", "b"]) == 0
        return capsys.readouterr().out

    assert "No settings are recorded for these runs." in (said := compare()) and "HParams({...})" in said
    assert "No settings" not in (said := compare(lambda lr: HParams({"lr": lr}))) and "0.2" in said


def test_secrets_stay_hidden_in_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        trained(name, hooks=[HParams({"api_key": f"s3cr3t-{name}", "width": width})])
        for name, width in (("a", 1), ("b", 2))
    ]
    for is_old in (False, True):
        for arguments in ([], ["--json"]):
            assert main(["summary", *map(str, paths), *arguments]) == 0
            said = capsys.readouterr().out
            assert "s3cr3t" not in said and "width" in said
        for path in paths if not is_old else ():
            (path / "run.json").unlink()  # an older version kept the hyper-parameters in the log alone


ESCAPE = "\x1b[31m\x07evil\n"


def test_runs_are_listed_the_newest_first_with_their_best_value(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(logger=True, run_dir="runs/a", hooks=[ModelCheckpoint(monitor="val/loss")]).fit(
        Net(), batches(), batches()
    )
    quiet(logger=True, run_dir="runs/sweep/b", max_epochs=2).fit(Net(), batches(), batches())
    for name, when in (("a", "2026-01-01T00:00:00+00:00"), ("sweep/b", "2026-02-01T00:00:00+00:00")):
        path = Path("runs", name, "run.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "started_at": when}))
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "status", "step", "epochs", "best", "age", "size"]
    assert [line.split()[0] for line in lines[1:]] == ["sweep/b", "a"]
    assert all("completed" in line and "val/loss" in line and "kB" in line for line in lines[1:])
    assert main(["runs", "runs", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (
        data["version"] == 1 and [each["step"] for each in data["runs"]] == [8, 4] and data["problems"] == []
    )
    assert data["runs"][0]["best"]["direction"] == "lower" and data["runs"][1]["best"]["metric"] == "val/loss"


def test_terminal_escapes_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    recorded(
        f"runs/{ESCAPE}", [evaluation_row(1, **{f"val/loss{ESCAPE}": 1.0})], status=ESCAPE, reason=ESCAPE
    )
    assert main(["runs"]) == 0
    assert main(["summary", f"runs/{ESCAPE}"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b[31m" in shown


def test_no_runs_and_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "There are no runs in . or below it.\n"
    with pytest.raises(OptionError, match="runz does not exist"):
        list_runs("runz")
    assert main(["runs", "runz"]) == 2
    Path("file").touch()
    assert main(["runs", "file"]) == 2


# ---- report ------------------------------------------------------------------------------------------------


def test_it_says_where_the_page_is(capsys: pytest.CaptureFixture[str]) -> None:
    written("run", metrics(1, loss=1.0), metrics(2, loss=0.5))
    assert main(["report", "run"]) == 0
    said = capsys.readouterr().out
    assert "step 2, in the first epoch, 2 records" in said and "wrote run/report.html" in said
    assert Path("run/report.html").read_text().startswith("<!doctype html>")


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        written(name, metrics(1, loss=1.0))
    assert main(["report", "a", "b", "--out", "both.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == "both.html" and told["bytes"] == Path("both.html").stat().st_size
    assert [(each["run_dir"], each["step"], each["records"]) for each in told["runs"]] == [
        ("a", 1, 1),
        ("b", 1, 1),
    ]


def test_a_wrong_directory_is_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    written("run", metrics(1, loss=1.0))
    assert main(["report", "rum"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err


def test_what_is_not_a_run_among_several_is_skipped_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    trained("a")
    trained("b", lr=0.2)
    Path("runs/notes").mkdir()
    Path("runs/list.txt").write_text("text")
    every = sorted(map(str, Path("runs").iterdir()))
    assert main(["summary", *every]) == 0
    said = capsys.readouterr()
    assert "lr" in said.out and {line.split()[0] for line in said.out.splitlines()[1:]} == {"a", "b"}
    assert said.err.splitlines() == [
        "skipped: runs/list.txt is a file; give the directory of a run, such as runs.",
        "skipped: runs/notes is not the directory of a run: it has neither log.jsonl nor run.json.",
    ]
    assert main(["summary", "runs/a", "runs/notes"]) == 0
    assert capsys.readouterr().out.startswith("runs/a\n  status ")
    assert main(["report", *every]) == 0 and "runs/notes" in capsys.readouterr().err
    for wrong in (["runs/notes"], ["runs/notes", "runs/list.txt"]):
        assert main(["summary", *wrong]) == 2 and "runs/notes is not" in capsys.readouterr().err
    assert main(["summary", "runs/a", "runs/c"]) == 2 and "runs/c does not exist" in capsys.readouterr().err


def test_settings_that_differ_in_a_late_digit_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    trained("a", lr=0.100001)
    trained("b", lr=0.100002)
    assert main(["summary", "a", "b"]) == 0
    text = capsys.readouterr().out
    assert "0.100001" in text and "0.100002" in text


def test_a_warning_of_several_lines_reads_as_sentences_and_a_long_one_ends_with_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = "The checkpoint restores optimizers. To use new values, set them."
    changed = f"Settings have changed:\n  lr of SGD: 0.01 in it, 0.003 now; 0.003 is used\n{advice}"
    long = "The first is short. " + "The second has many words " * 20 + "to the end."
    written("run", *({"type": "warning", "step": 1, "message": each} for each in (changed, long)))
    assert main(["summary", "run"]) == 0
    lines = [line.split(None, 1)[1] for line in capsys.readouterr().out.splitlines() if "warning " in line]
    assert lines == [
        f"Settings have changed: lr of SGD: 0.01 in it, 0.003 now; 0.003 is used. {advice}",
        "The first is short. … (--json has the rest)",
    ]
