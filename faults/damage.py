"""Damaged files: the newest checkpoint must be passed over, by name and with the reason, and an older whole
one taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

from processes import Child, notes
from training import NOTES, RUN, Settings, feed, prepare, train
from trials import Kind, Outcome, compare, last_lines, trial_numbers

from hookline import Hook
from hookline.checkpoint.files import read

WAYS = ("truncated", "flipped", "emptied", "deleted", "swapped", "grown")
AT_ONCE = 20
"""Damaged checkpoints in one trial: each is copied, damaged and looked at in one process."""
STOP_AT = 14


class Damage(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return as many trials as damage about 500 checkpoints."""
        return trial_numbers(32, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Train to the end from one damaged folder in every fifth trial; otherwise only check, many times,
        where a run begins.
        """
        rng = random.Random(f"damage {self.seed} {number}")
        settings = Settings(
            rng.choice(("32", "bf16-mixed")), save=rng.choice(("sync", "async")), stop_at=STOP_AT
        )
        before = Child(folder / "before", settings)
        if before.wait() != 0 or not newest_first(folder / "before" / RUN):
            return Outcome(
                number, wrong=f"the run to be damaged could not be made: {last_lines(before.said)}"
            )
        return (
            self.look(number, rng, folder)
            if number % 5
            else self.train_on(number, rng, folder, settings.numbers)
        )

    def train_on(self, number: int, rng: random.Random, folder: Path, settings: Settings) -> Outcome:
        """Train to the end from one damaged folder."""
        place = folder / "before"
        done, expected = damage(rng, place / RUN)
        (place / NOTES).unlink()  # what was announced before is damaged now
        must_be_said = in_the_way(done, expected)
        child = Child(place, settings)
        child.wait()
        outcome = compare(Outcome(number, note="to the end"), child, self.references.digest(settings))
        began = [name for kind, _, name in notes(child.folder) if kind == "resumed"]
        if began != [expected.name]:
            outcome.lost, outcome.wrong = (
                1,
                f"{outcome.wrong} began at {began}, not at {expected.name} after: {done}",
            )
        outcome.wrong = outcome.wrong or unsaid(child.said, must_be_said)
        return outcome

    def look(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        """Damage many folders, one after the other, and check where a run begins."""
        outcome = Outcome(number, counts=AT_ONCE, resumed=AT_ONCE, exact=AT_ONCE, note="looked at")
        child = Child(folder / "looked", Settings(), body=lambda: self.look_at_many(rng, folder))
        child.wait()
        found = folder / "found.json"
        if not found.exists():
            return Outcome(number, counts=AT_ONCE, wrong=f"it never ended; it said: {last_lines(child.said)}")
        for problem in json.loads(found.read_text()):
            outcome.wrong = f"{outcome.wrong}; {problem['wrong']}".removeprefix("; ")
            outcome.silent += problem["silent"]
            outcome.exact -= 1
        return outcome

    def look_at_many(self, rng: random.Random, folder: Path) -> None:
        """Damage a folder in a child, begin a run, and stop it as soon as it has begun."""
        problems = []
        for index in range(AT_ONCE):
            place = folder / f"look-{index}"
            shutil.copytree(
                folder / "before" / RUN, place / RUN, ignore=shutil.ignore_patterns("*.sock")
            )  # of a dead process
            done, expected = damage(rng, place / RUN)
            must_be_said = in_the_way(done, expected)
            where, said = begin(place)
            if where is not None and any(
                path == where for path, _, _ in done
            ):  # swapped with a twin: no harm
                if differs(place, where, folder / "before"):
                    problems.append({"silent": 1, "wrong": f"took {where.name} without a word after: {done}"})
            elif where != expected:
                wrong = f"began at {where}, not at {expected.name}, after: {done}; said: {last_lines(said)}"
                problems.append({"silent": 0, "wrong": wrong})
            elif missing := unsaid(said, must_be_said):
                problems.append({"silent": 0, "wrong": missing})
            shutil.rmtree(place)
        (folder / "found.json").write_text(json.dumps(problems))


# ---- damaging ----------------------------------------------------------------------------------------------

Done = list[tuple[Path, str, str]]
"""The checkpoint, the file in it and what was done to it."""


def newest_first(run_dir: Path) -> list[Path]:
    """Return the intact checkpoints of a run by their position, the newest first."""
    manifests = {
        path.parent: json.loads(path.read_text())
        for path in run_dir.rglob("manifest.json")
        if not any(part.startswith(".") for part in path.relative_to(run_dir).parts)
    }
    return sorted(manifests, key=lambda path: manifests[path]["saves"], reverse=True)


def _number(path: Path) -> int:
    return int(json.loads((path / "manifest.json").read_text())["saves"])


def damage(rng: random.Random, run_dir: Path) -> tuple[Done, Path]:
    """Damage the newest checkpoint, or the two newest. Returns what was done, and which one a resume must
    take.
    """
    checkpoints = newest_first(run_dir)
    done: Done = []
    for path in checkpoints[: rng.choice((1, 1, 1, 2))]:
        file = rng.choice(sorted(path.iterdir()))
        way = rng.choice(WAYS)
        others = [each for each in checkpoints if _other(each / file.name, file)] if way == "swapped" else []
        if way == "swapped" and others:
            other = rng.choice(others) / file.name
            mine = file.read_bytes()
            file.write_bytes(other.read_bytes())
            other.write_bytes(mine)
            done.append((other.parent, file.name, way))
        else:
            _damage_file(rng, file, way := "flipped" if way == "swapped" else way)
        done.append((path, file.name, way))
        if way == "swapped":
            break  # damaging one of the two again could undo it
    return done, next(each for each in checkpoints if all(each != path for path, _, _ in done))


def _other(file: Path, than: Path) -> bool:
    return file.exists() and than.exists() and file.read_bytes() != than.read_bytes()


def _damage_file(rng: random.Random, file: Path, way: str) -> None:
    data = bytearray(file.read_bytes())
    if way == "deleted":
        file.unlink()
        return
    if way == "truncated":
        data = data[: rng.randrange(len(data))]
    elif way == "emptied":
        data = bytearray()
    elif way == "grown":
        data += rng.randbytes(rng.randint(1, 100))
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


# ---- looking -----------------------------------------------------------------------------------------------


class Enough(Exception):
    """The run has begun; that is all that was asked."""


class Look(Hook):
    """Stops a run as soon as it is known where it begins."""

    where: Path | None = None

    def on_checkpoint_load(self, path: Path) -> None:
        """Record the checkpoint."""
        self.where = Path(path)

    def on_fit_start(self) -> None:
        """Stop the run: by now it has loaded a checkpoint, or there is none."""
        raise Enough


class Listen(logging.Handler):
    """What Hookline says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one more line."""
        self.lines.append(record.getMessage())


def begin(place: Path) -> tuple[Path | None, str]:
    """Return where a run with `resume="auto"` begins, and what it logs about it."""
    prepare(place)
    look, listen = Look(), Listen()
    logger = logging.getLogger("hookline")
    logger.addHandler(listen)
    try:
        train(place, Settings(logger=False), hooks=(look,))
    except Enough:
        return look.where, "\n".join(listen.lines)
    finally:
        logger.removeHandler(listen)
    return None, "the run went on to its end\n" + "\n".join(listen.lines)


def differs(place: Path, taken: Path, before: Path) -> bool:
    """Return whether the contents differ from what was saved: a flipped blank in the manifest's layout
    changes nothing.
    """
    return _bytes_of(read(taken)) != _bytes_of(read(before / taken.relative_to(place)))


def _bytes_of(contents: Any) -> str:
    into = hashlib.sha256()
    feed(into, contents)
    return into.hexdigest()


def in_the_way(done: Done, expected: Path) -> Done:
    """Return the damaged checkpoints that a resume reads before the expected one; a swapped manifest may sort
    one behind it.
    """
    return [each for each in done if each[2] != "swapped" or _number(each[0]) > _number(expected)]


def unsaid(said: str, done: Done) -> str:
    """Return an empty string if every damaged file was named together with its checkpoint, else what is
    missing.
    """
    for path, file, way in done:
        # with another one's manifest it is the other files that look wrong
        named = "" if (file, way) == ("manifest.json", "swapped") else file
        if not any(" skips " in line and path.name in line and named in line for line in said.splitlines()):
            return f"{path.name}/{file} was {way}, and it was not reported; said: {last_lines(said)}"
    return ""
