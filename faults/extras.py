"""Files of others in checkpoints, written by a hook, while the run is killed: they are left alone, and go
with the checkpoint.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from pathlib import Path

from kills import AIMS, wait_for
from processes import Child
from training import RUN, Settings, train
from trials import Kind, Outcome, compare, draw, last_lines, trial_numbers

from hookline import CheckpointError, Hook
from hookline.checkpoint.files import extra_names, read_manifest, verify

NAMES = ("config.json", "manifest.json", "model.safetensors", "state.json", "rank-0.json", "tokenizer.json")


class Exports(Hook):
    """Writes a folder for another tool beside our files, some of it under our names, and a
    note of the step.
    """

    def on_checkpoint_save(self, path: Path, step: int) -> None:
        """Write files beside those of the complete checkpoint."""
        (path / "hf" / "deeper").mkdir(parents=True)
        for name in NAMES:
            (path / "hf" / name).write_text(f"of step {step}")
        (path / "hf" / "deeper" / "link").symlink_to("nowhere")
        (path / "notes.txt").write_text(str(step))


class Extras(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(40, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Kill one run with such a hook once or several times, then start it again until it ends."""
        rng = random.Random(f"extras {self.seed} {number}")
        settings = draw(rng)
        expected = self.references.digest(settings)
        kills, killed = rng.choice((1, 1, 2, 3)), ""
        while True:
            child = _start(folder, settings)
            wait_for(child, rng, rng.choice((*AIMS, "save")), self.references.seconds(settings))
            killed = killed or child.phase[0]
            child.kill(signal.SIGKILL, group=rng.random() < 0.5)
            kills -= 1
            if child.wait() == 0 or kills == 0:
                break
        if child.result is None:
            last = _start(
                folder, dataclasses.replace(settings, workers=3 - settings.workers if settings.workers else 0)
            )
            last.wait()
        else:
            last = child
        outcome = compare(Outcome(number, note=killed), last, expected)
        outcome.wrong = (
            outcome.wrong
            or left_wrong(folder / RUN)
            or (f"a checkpoint was passed over: {last_lines(last.said)}" if " skips " in last.said else "")
        )
        return outcome


def _start(folder: Path, settings: Settings) -> Child:
    return Child(folder, settings, body=lambda: train(folder, settings, hooks=(Exports(),)))


def left_wrong(run_dir: Path) -> str:
    """Return an empty string if every checkpoint is complete, has the files of its own step only, and no
    other file is left.
    """
    folders = [
        each
        for parent in (run_dir / "checkpoints", run_dir / "checkpoints" / "best")
        if parent.is_dir()
        for each in parent.iterdir()
        if each.name != "best"
    ]
    for path in folders:
        if path.name.startswith("."):
            return f"{path.name} was left behind"
        try:
            verify(path)
        except CheckpointError as error:
            return f"{path.name}: {error}"
        notes = path / "notes.txt"
        if not set(extra_names(path)) <= {"hf", "notes.txt"}:
            return f"{path.name} has {extra_names(path)}"
        if notes.exists() and notes.read_text() and int(notes.read_text()) != read_manifest(path)["step"]:
            return (
                f"{path.name} is of step {read_manifest(path)['step']}, and has the files of step "
                f"{notes.read_text()}"
            )
    return ""
