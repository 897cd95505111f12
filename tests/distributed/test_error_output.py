"""An error that several ranks have is printed once, by rank zero if it has it too; an error of one rank by that rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks.torchrun import Outcome, by_torchrun, torchrun
from tiny import Net, batches, quiet
from torch import distributed as dist

from hookline import OptionError
from hookline.distributed import error_output
from hookline.distributed.error_output import print_once

LINE = re.compile(r"\[rank (\d)\] (?:(\w+): )?the same error as on rank (\d), which prints it")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of torchrun's agent, which ranks reach before they are connected."""
    torch_dist: Any = dist
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True)
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(store.port)),
        ("WORLD_SIZE", "3"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(error_output, "ZERO_FIRST", 0.05)
    monkeypatch.setattr(error_output, "PRINTING", 0.05)
    monkeypatch.setattr(error_output, "ENDING", 0.0)
    return store


def say(monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException | str, **env: str) -> bool:
    """Print an error as this rank; return whether it was shown."""
    shown: list[int] = []
    with monkeypatch.context() as patch:
        for name, value in {"RANK": str(rank), **env}.items():
            patch.setenv(name, value)
        print_once(error, lambda: shown.append(rank))
    return bool(shown)


def test_the_same_error_is_shown_once_and_the_other_ranks_name_the_one_that_shows_it(
    agent: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [say(monkeypatch, rank, OptionError("lr")) for rank in range(3)] == [True, False, False]
    assert LINE.findall(capsys.readouterr().err) == [("1", "OptionError", "0"), ("2", "OptionError", "0")]


def test_another_text_or_type_is_another_error(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [ValueError("a"), ValueError("b"), TypeError("a")]
    assert all(say(monkeypatch, rank, error) for rank, error in enumerate(errors))


def test_ranks_that_were_started_again_show_their_error_again(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert say(monkeypatch, 0, "usage") and say(monkeypatch, 0, "usage", **again)
    assert not say(monkeypatch, 1, "usage", **again)


@pytest.mark.parametrize(
    "env", [{"HOOKLINE_FULL_TRACEBACK": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"MASTER_PORT": "1"}]
)
def test_without_a_store_or_if_the_user_asks_for_it_every_rank_shows_its_error(
    agent: Any, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    monkeypatch.setattr(error_output, "CONNECTING", error_output.CONNECTING / 10)
    assert [say(monkeypatch, rank, "usage", **env) for rank in range(2)] == [True, True]


def test_an_error_whose_text_cannot_be_read_is_shown(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("broken")

    assert [say(monkeypatch, rank, Broken()) for rank in range(2)] == [True, True]


def test_one_process_keeps_its_exception_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    quiet().fit(Net(), batches(1))
    assert sys.excepthook is before


# ---- in a job --------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
import torch
from tiny import Net, batches, quiet
from hookline import Hook
import ranks.patient

CASE, RANK = sys.argv[1], int(os.environ["RANK"])


class Fails(Hook):
    def on_step_end(self, rank, step):
        if CASE == "one" and rank == 2 and step == 2:
            raise ValueError("only here")
        if CASE == "own" and step == 2:
            raise ValueError(f"the disk of rank {rank} is full")


class Rates(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 + (RANK if CASE == "rates" else 0))


quiet(hooks=[Fails()], **({"max_epoch": 3} if CASE == "option" else {})).fit(Rates(), batches(12))
"""


def run(folder: Path, case: str) -> tuple[Outcome, dict[str, str]]:
    """Run three ranks; return also what each one wrote to stderr."""
    outcome = torchrun(SCRIPT, folder, case, ranks=3)
    assert outcome.code == 1, outcome.output
    said = {each.parent.name: each.read_text() for each in folder.glob("said-*/**/stderr.log")}
    assert set(said) == {"0", "1", "2"}
    return outcome, said


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("option", "OptionError: Trainer has no option 'max_epoch'"),
        ("rates", "OptionError: The ranks have different optimizers: lr of group 0"),
    ],
)
def test_an_error_of_all_ranks_is_printed_by_one_of_them(tmp_path: Path, case: str, error: str) -> None:
    outcome, said = run(tmp_path, case)
    printed = [rank for rank, text in said.items() if error in text]
    assert len(printed) == 1, outcome.output
    assert said[printed[0]].count("Traceback (most recent") == 1
    for rank, text in said.items():  # a rank that torchrun has ended before has written nothing
        if rank not in printed:
            assert "Traceback" not in text
            assert set(LINE.findall(text)) <= {(rank, "OptionError", printed[0])}, text


def test_an_error_of_one_rank_is_printed_by_it_and_the_others_name_it(tmp_path: Path) -> None:
    outcome, said = run(tmp_path, "one")
    assert "ValueError: only here" in said["2"] and "Traceback" in said["2"], outcome.output
    assert not LINE.search(said["2"])
    for rank in "01":
        assert "Rank 2 has failed: ValueError: only here" in said[rank], outcome.output
        assert "Traceback" not in said[rank]


def test_errors_that_differ_are_printed_by_each_rank(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "own")
    assert not LINE.search(outcome.output), outcome.output


def test_the_command_line_prints_a_wrong_configuration_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[trainer]\nmax_epoch = 3\n[module]\nclass_path = "torch.nn.Identity"\n'
    )
    done = by_torchrun("-m", "hookline", "fit", "run.toml", cwd=tmp_path, ranks=3)
    assert done.stderr.count("hookline: ") == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
