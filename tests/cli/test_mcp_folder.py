"""The folder that a server opens files in: names of runs, and every way out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.reported import metrics, written

from hookline.cli.mcp_folder import ServedFolder
from hookline.util.errors import OptionError


def served() -> ServedFolder:
    written("runs/first", metrics(1, loss=1.0))
    written("runs/deep/second", metrics(1, loss=1.0))
    written("outside", metrics(1, loss=1.0))
    return ServedFolder(Path("runs"))


def test_a_run_is_named_by_its_path_below_the_folder() -> None:
    folder = served()
    for name in ("first", "deep/second"):
        assert folder.name(folder.run(name)) == name
    assert folder.run(str(Path("runs/first").resolve())) == folder.run("deep/../first")
    alone = ServedFolder(Path("runs/first"))
    assert alone.name(alone.run(".")) == "."


@pytest.mark.parametrize("name", ["../outside", "..", "/", "~", "first/../../outside", "first\0", "/etc"])
def test_no_path_leads_out(name: str) -> None:
    folder = served()
    with pytest.raises(OptionError, match=r"is not below|There is no run '~'"):
        folder.run(name)


def test_no_link_leads_out_but_that_of_the_checkpoints() -> None:
    folder, outside = served(), Path("outside").resolve()
    Path("runs/linked").symlink_to(outside)
    with pytest.raises(OptionError, match="is not below"):
        folder.run("linked")
    Path("storage").mkdir()
    Path("runs/first/checkpoints").symlink_to(Path("storage").resolve())
    Path("runs/first/inside.json").symlink_to(Path("runs/deep/second/log.jsonl").resolve())
    assert folder.run("first").is_dir()
    Path("runs/deep/second/logs").mkdir()
    Path("runs/deep/second/logs/rank0.jsonl").symlink_to(outside / "log.jsonl")
    with pytest.raises(OptionError, match=r"its logs.rank0.jsonl is a link to outside"):
        folder.run("deep/second")
    Path("runs/first/trace.json").symlink_to(outside / "log.jsonl")
    with pytest.raises(OptionError, match=r"first is not opened: its trace.json is a link to outside"):
        folder.run("first")


def test_a_folder_moved_below_a_link_is_still_the_folder() -> None:
    served()
    Path("there").symlink_to(Path("runs").resolve())
    folder = ServedFolder(Path("there"))
    assert folder.name(folder.run("first")) == "first"


def test_a_file_needs_its_ending_and_the_nearest_is_suggested() -> None:
    Path("code").mkdir()
    Path("code/probe.py").write_text("")
    folder = ServedFolder(Path("code"))
    assert folder.file("probe.py", (".py",)).name == "probe.py"
    with pytest.raises(OptionError, match=r"Did you mean 'probe.py'\?"):
        folder.file("prob.py", (".py",))
    with pytest.raises(OptionError, match=r"give a file that ends with .toml"):
        folder.file("probe.py", (".toml",))


def test_unknown_runs_are_answered_with_a_few_known_ones() -> None:
    for number in range(15):
        written(f"runs/run{number:02}", metrics(1, loss=1.0))
    with pytest.raises(OptionError, match=r"Did you mean 'run11'\? Runs: run00, .* and 5 more"):
        ServedFolder(Path("runs")).run("run111")
    Path("empty").mkdir()
    with pytest.raises(OptionError, match="There are no runs"):
        ServedFolder(Path("empty")).run("x")
