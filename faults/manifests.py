"""Hostile checkpoints whose checksums are right: a resume takes what it can use, the next one, or raises an
error of ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from damage import Listen, newest_first
from hostile import mutate
from processes import Child
from training import RUN, Settings, prepare, train
from trials import Kind, Outcome, last_lines, trial_numbers

from hookline import Hook, HooklineError, NonFiniteLoss
from hookline.cli import main

AT_ONCE = 5
"""Mutations in one trial: each is copied, changed and resumed from in one process."""
STOP_AT = 14
LONGEST = 60
"""Seconds for one of them, on a busy machine."""


class Manifests(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return as many trials as mutate about 350 checkpoints."""
        return trial_numbers(70, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Train once, then make one checkpoint of many copies of the run hostile."""
        rng = random.Random(f"manifests {self.seed} {number}")
        settings = Settings(rng.choice(("32", "bf16-mixed")), accumulate=rng.choice((1, 5)), stop_at=STOP_AT)
        before = Child(folder / "before", settings)
        if before.wait() != 0 or not newest_first(folder / "before" / RUN):
            return Outcome(
                number, wrong=f"the run to be changed could not be made: {last_lines(before.said)}"
            )
        child = Child(folder / "tried", settings, body=lambda: try_many(rng, folder, settings))
        child.wait(AT_ONCE * LONGEST)
        found = folder / "found.json"
        if not found.exists():
            return Outcome(number, counts=AT_ONCE, wrong=f"it never ended; it said: {last_lines(child.said)}")
        found_there = json.loads(found.read_text())
        wrong = "; ".join(found_there["wrong"])
        fine = AT_ONCE - len(found_there["wrong"])
        return Outcome(
            number, counts=AT_ONCE, resumed=fine, exact=fine, wrong=wrong, note=found_there["note"]
        )


def try_many(rng: random.Random, folder: Path, settings: Settings) -> None:
    """Change a checkpoint in a child, resume, and record the result."""
    wrong, ways = [], {"taken": 0, "passed over": 0, "refused": 0}
    for index in range(AT_ONCE):
        place = folder / f"try-{index}"
        shutil.copytree(folder / "before" / RUN, place / RUN, ignore=shutil.ignore_patterns("*.sock"))
        newest = newest_first(place / RUN)[0]
        said = mutate(rng, newest)
        outcome = resume(place, settings, newest)
        if outcome in ways:
            ways[outcome] += 1
        else:
            wrong.append(f"{said} -> {outcome}")
        if problem := look(newest):
            wrong.append(f"{said} -> {problem}")
        shutil.rmtree(place)
    note = ", ".join(f"{count} {way}" for way, count in ways.items() if count)
    (folder / "found.json").write_text(json.dumps({"wrong": wrong, "note": note}))


class Where(Hook):
    """Records the checkpoint from which the run continued."""

    path: Path | None = None

    def on_checkpoint_load(self, path: Path) -> None:
        """Record the checkpoint."""
        self.path = Path(path)


def resume(place: Path, settings: Settings, hostile: Path) -> str:
    """Return the result of a resume: 'taken', 'passed over', 'refused', or what went wrong."""
    prepare(place)
    where, listen = Where(), Listen()
    logging.getLogger("hookline").addHandler(listen)
    try:
        with limited():
            train(place, Settings(settings.precision, settings.accumulate, logger=False), hooks=(where,))
        outcome = (
            "taken" if where.path == hostile else "passed over" if where.path is not None else "it began anew"
        )
    except NonFiniteLoss:
        outcome = "taken"  # odd numbers were trained on, and noticed
    except HooklineError:
        outcome = "refused"
    except BaseException as error:
        if any(
            "in load_state_dict" in note and "hook 'record'" in note
            for note in getattr(error, "__notes__", ())
        ):
            return "refused"  # by the user's own hook, which is named: what state it takes is its own matter
        frame = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"{type(error).__name__}: {str(error)[:200]} ({Path(frame.filename).name}:{frame.lineno})"
    finally:
        logging.getLogger("hookline").removeHandler(listen)
    said = "\n".join(listen.lines)
    return outcome if is_clean(said) else f"control characters in the log: {said[:300]!r}"


def look(checkpoint: Path) -> str:
    """Return an empty string if the command line describes the checkpoint without characters that move a
    cursor.
    """
    import io

    for command in ("show", "verify"):
        output = io.StringIO()
        try:
            with limited(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                main(["checkpoint", command, str(checkpoint)])
        except BaseException as error:
            return f"checkpoint {command}: {type(error).__name__}: {error}"
        if "Traceback" in output.getvalue() or not is_clean(output.getvalue()):
            return f"checkpoint {command} printed: {output.getvalue()[-300:]!r}"
    return ""


def is_clean(text: str) -> bool:
    """Return whether a text has no control characters except line ends."""
    return all(each.isprintable() for each in text.split("\n"))


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise an error in code that takes too long: a hostile checkpoint must not keep a job busy."""

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError(f"it was not over after {LONGEST} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
