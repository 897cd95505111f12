"""The first batch after each save: its fingerprint is recorded, and compared when a run resumes there.

A loader may report a wrong position or shuffle differently in each process. Neither can be seen in its state.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookline.data.fingerprint import Fingerprint, difference, fingerprint
from hookline.data.loaders import Loader
from hookline.run.run import Run

log = logging.getLogger("hookline")
FOLDER = "batches"
"""A folder in the run's directory, with one file for each rank and one line for each save and loader."""
MOST = 16
"""The most saves that wait for the next batch of one loader; a mixture may not use a loader for long."""
MOST_BYTES = 16_000_000
"""The number of bytes that are read from the end of such a file."""
READER_ADVICE = {
    "list": "The list holds other batches than before.",
    "indices": "Its sampler made another order. Pass DataLoader(generator=...), or give the sampler "
    "state_dict and "
    "load_state_dict.",
    "state": "Its load_state_dict did not return to where its state_dict was taken. The state must count "
    "the batches that were "
    "yielded, and hold what is waiting in a shuffle buffer.",
    "stream": "It was read again up to this batch, and came in another order. Seed its shuffle, or let it "
    "draw from random, "
    "numpy.random or torch, which are seeded for it.",
}

BatchLocation = dict[str, int]


class FirstBatches:
    """Record or compare the next batch of each training loader. The loop drops it when that is done."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.waiting: dict[str, list[BatchLocation]] = {}
        """The saves for which the next batch of a loader is recorded, by the loader's name."""
        self.expected: dict[str, Fingerprint] = {}
        """The next batch of a loader in the run that made the checkpoint."""

    def fetched(self) -> None:
        """Record or compare the batch that was just fetched."""
        run, s = self.run, self.run.state
        loader = next((each for each in run.data.loaders["train"] if each.name == s.dataloader_name), None)
        if loader is None or loader.sharding.rank_batch.is_padding:
            return
        places, expected = self.waiting.pop(loader.name, None), self.expected.pop(loader.name, None)
        if places is not None:
            try:
                found = fingerprint(s.batch)
            except Exception as error:  # of a class of the user's own; this check must not end the run
                log.debug(
                    "The batch of the %s loader has no fingerprint: %s: %s",
                    loader.name,
                    type(error).__name__,
                    error,
                )
            else:
                if expected is not None and (differs := difference(expected, found)):
                    _warn_of_difference(run, loader, differs)
                # the first place is that of the resume, which is recorded already
                if new := places if expected is None else places[1:]:
                    _append_records(run, loader.name, new, found)
        if not self.waiting:
            run.saves.first_batches = None


def after_save(run: Run) -> None:
    """Record the next batch of each training loader: a resume from this save must begin with it."""
    if run.stage != "fit" or run.data.train is None or _record_folder(run) is None:
        return
    run.saves.first_batches = firsts = run.saves.first_batches or FirstBatches(run)
    for loader in run.data.loaders["train"]:
        places = firsts.waiting.setdefault(loader.name, [])
        if (place := _place(run)) not in places:
            places.append(place)
            del places[:-MOST]


def after_resume(run: Run) -> None:
    """Compare the next batch of each training loader with the recorded one, or record it if there is none."""
    firsts, place = FirstBatches(run), _place(run)
    # loaders that have changed yield other batches, and a warning was logged about them
    same = [each.name for each in run.data.loaders["train"] if each.is_as_saved]
    firsts.expected = {name: found for name, found in _find_fingerprints(run, place).items() if name in same}
    firsts.waiting = {
        name: [place] for name in same if name in firsts.expected or _record_folder(run) is not None
    }
    run.saves.first_batches = firsts if firsts.waiting else None


def path_from(checkpoint: Path | str, run: Run) -> str | None:
    """Return the relative path from a checkpoint to the run's directory, which has the recorded batches."""
    folder = _record_folder(run)
    return None if folder is None or "://" in str(checkpoint) else os.path.relpath(folder, checkpoint)


def _place(run: Run) -> BatchLocation:
    """Return the position of the run in its data, as a checkpoint keeps it."""
    return {
        "epoch": run.state.epochs_seen,
        "batch": run.progress.position,
        "batches_seen": run.state.batches_seen,
    }


def _record_folder(run: Run) -> Path | None:
    """Return the run's directory; None if the run writes nothing else, so that none is made for this."""
    return run.directory.intended() if run.options.run_dir is not None else run.directory.existing()


def _file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank}.jsonl"


def _append_records(run: Run, loader: str, places: list[BatchLocation], found: Fingerprint) -> None:
    lines = [json.dumps({"run": run.identity.id, "loader": loader, **place, **found}) for place in places]
    path = _file(run.run_dir(), run.state.rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")  # the first newline ends a line cut off by a kill
    except OSError as error:
        log.warning(
            "The fingerprint of the first batch after a save cannot be written to %s: %s", path, error
        )


def _find_fingerprints(run: Run, place: BatchLocation) -> dict[str, Fingerprint]:
    """Return the newest recorded fingerprint of the batch after this position, by loader."""
    found: dict[str, Fingerprint] = {}
    for run_dir in dict.fromkeys(_record_directories(run)):
        for record in _read_records(_file(run_dir, run.state.rank)):
            if record["run"] == run.identity.id and all(
                record[name] == number for name, number in place.items()
            ):
                found[record["loader"]] = record
    return found


def _record_directories(run: Run) -> Iterator[Path]:
    """Yield the directories that may have the record: the one that the checkpoint names, and the run's."""
    relative, checkpoint = run.resume.contents.get("record"), str(run.resume.path)
    if isinstance(relative, str) and "://" not in checkpoint:
        yield Path(os.path.normpath(os.path.join(os.path.abspath(checkpoint), relative)))
    if (known := run.directory.existing()) is not None:
        yield known.absolute()


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_BYTES))
            lines = file.read(MOST_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and {"run", "loader", "epoch", "batch", "batches_seen", *_KEYS} <= set(
            record
        ):
            yield record


_KEYS = ("structure", "exact", "floats")


def _warn_of_difference(run: Run, loader: Loader, differs: str) -> None:
    """Warn in the log of the process and in the log of the run that the batch differs."""
    s, dataset = run.state, getattr(loader.source, "dataset", None)
    kind = type(loader.source).__name__ + (f" of {type(dataset).__name__}" if dataset is not None else "")
    text = (
        f"The {loader.name} loader ({kind}) did not deliver the expected batch: batch {s.batch_idx} of "
        f"epoch {s.epoch} is not the one that followed this checkpoint before. In the new one {differs}. "
    )
    if "are the same" in differs:
        text += (
            "Either random augmentation differs, or these are other samples with the same labels. "
            "Let augmentation draw from random, numpy.random or torch, which are seeded for it. "
        )
    else:
        text += f"Samples of this epoch may be repeated or missing. {READER_ADVICE[loader.reader.kind]} "
    text += "If you changed the data on purpose, ignore this."
    log.warning(text)
    s.logger.log_event(
        "warning",
        {"step": s.step, "epoch": s.epoch, "batch": s.batch_idx, "loader": loader.name, "message": text},
    )
