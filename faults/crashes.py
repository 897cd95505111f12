"""SIGKILL at every file-system call of a save: one under a new name, one that replaces, one that prunes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from filesystem import Call, Calls, read_log, wrong_order
from processes import Child
from training import RUN, Settings, train
from trials import Kind, Outcome, last_lines, resume_and_compare

FOLDER, LOG = "checkpoints", "calls.txt"
TORN, BEHIND = 100_000, 1_000_000
"""A trial's number is that of the call; plus TORN: half of a write gets through; plus BEHIND: saved in the
background.
"""
ORDER = {-1: "sync", -2: "async"}
"""Trials that nothing is killed in: they look at the order of the calls."""


class Crashes(Kind):
    """Trials of this kind."""

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """End one run at a file system call, and start it again."""
        if number in ORDER:
            calls, said = recorded(folder, ORDER[number])
            wrong = wrong_order(calls) if calls else f"no calls were seen; said: {said}"
            return Outcome(number, resumed=1, exact=int(not wrong), wrong=wrong, note="order of calls")
        behind, at, torn = number >= BEHIND, number % TORN, number % BEHIND >= TORN
        settings = Settings(save="async" if behind else "sync")
        calls_until = Calls(folder / RUN / FOLDER, kill_at=at, torn=torn)

        def body() -> None:
            calls_until.install()
            train(folder, settings)

        first, expected = Child(folder, settings, body=body), self.references.digest(settings)
        code = first.wait()
        if code != -9 and not (behind and code == 0):  # saves in the background may be fewer: one at a time
            return Outcome(
                number,
                wrong=f"exit code {code} instead of a kill at call {at}; said: {last_lines(first.said)}",
            )
        return resume_and_compare(
            Outcome(number, note=settings.save + (", torn write" if torn else "")), first, settings, expected
        )

    def trials(self, share: float) -> list[int]:
        """Return every call of three saves, found by recording a run: the first, the first that replaces, the
        first that prunes.
        """
        with tempfile.TemporaryDirectory() as folder:
            calls, said = recorded(Path(folder), "sync")
        if not calls:
            raise SystemExit(f"A run whose file-system calls were to be recorded made none; it said: {said}")
        saves = _saves(calls)
        chosen = [
            saves[0],
            next(filter(_replaces, saves), saves[-1]),
            next(filter(_prunes, saves), saves[-1]),
        ]
        plain = sorted({number for save in chosen for number, _, _ in save})
        torn = [
            TORN + number
            for number, name, _ in sorted({each for save in chosen for each in save})
            if name == "write"
        ]
        every = max(1, round(1 / share))
        return [*ORDER, *plain[::every], *torn[::every], *(BEHIND + each for each in plain[:: 3 * every])]


Save = list[tuple[int, str, str]]


def _saves(calls: list[Call]) -> list[Save]:
    """Return the calls of each save, up to where the next one begins, with their numbers."""
    saves: list[Save] = []
    for number, (name, path) in enumerate(calls):
        if (name == "mkdir" and path.endswith(".new")) or not saves:
            saves.append([])
        saves[-1].append((number, name, path))
    return saves


def _replaces(save: Save) -> bool:
    return any(
        name == "exchange" or (name in ("rename", "replace") and path.endswith(".old"))
        for _, name, path in save
    )


def _prunes(save: Save) -> bool:
    return any(name == "rmdir" and not path.endswith(".old") for _, name, path in save)


def recorded(folder: Path, save: str) -> tuple[list[Call], str]:
    """Return the calls of a whole run, and its output."""
    calls = Calls(folder / RUN / FOLDER, log=folder / LOG)

    def body() -> None:
        calls.install()
        train(folder, Settings(save=save))

    child = Child(folder, Settings(save=save), body=body)
    child.wait()
    return read_log(folder / LOG), last_lines(child.said)
