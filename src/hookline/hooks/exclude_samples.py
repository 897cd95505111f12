"""Leave samples out of the training: from a file, or a list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from hookline.engine.checks import OnDisk, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.util.errors import OptionError

WHO = "ExcludeSamples"
LARGEST_FILE = 2**28


class ExcludeSamples(Hook):
    """Leaves samples out of the order of the training data: batches stay full, and an epoch becomes shorter.

    >>> ExcludeSamples([12, 99])
    >>> ExcludeSamples(file="bad.txt")

    `hookline samples RUN --step N --plain` writes such a file: on each line the index of a sample in the
    dataset, or the name of a loader and an index. Text after # is ignored. The list is part of the run:
    checkpoints have it, and samples that are added before a resume are left out from there on.
    """

    tier = "builtin"

    @checked_parameters
    def __init__(
        self,
        samples: Sequence[int] = (),
        file: Annotated[str | Path, OnDisk("the path of a file")] | None = None,
        loader: str | None = None,
        name: str | None = None,
    ) -> None:
        """Choose the samples.

        samples: their indices in the dataset. file: a file with more of them. loader: the name of the
        training loader, if there are several; lines of the file may name another one.
        """
        super().__init__(name)
        if loader is not None and not isinstance(loader, str):
            raise refused(f"{WHO}: loader", loader, "the name of a training loader")
        if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
            raise refused(f"{WHO}: samples", samples, "a list of indices, such as [12, 99]")
        self.loader = loader
        self.samples: dict[str | None, set[int]] = {}
        """The samples to leave out, by the name of their loader; None: the only one, or `loader`."""
        for each in samples:
            self._add(None, each, "samples")
        if file is not None:
            self._read(Path(file))
        if not self.samples:
            raise OptionError(f"{WHO}: there is no sample to leave out; pass samples=[...] or file='...'.")

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise OptionError(f"{WHO}: file {path} is larger than {LARGEST_FILE // 2**20} MB.")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise OptionError(f"{WHO}: file {path} cannot be read: {error}", option="file") from error
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if words:
                text = words[-1]
                if len(words) > 2 or not text.isdecimal():
                    raise OptionError(
                        f"{WHO}: file {path}, line {number}: {line.strip()!r}. A line has the index of a "
                        "sample, or the name of a loader and an index.",
                        option="file",
                    )
                self._add(words[0] if len(words) == 2 else None, int(text), f"file {path}, line {number}")

    def _add(self, loader: str | None, sample: Any, where: str) -> None:
        if isinstance(sample, bool) or not isinstance(sample, int) or sample < 0:
            raise OptionError(
                f"{WHO}: {where}: {sample!r} is not the index of a sample, which is a whole number from 0 on."
            )
        self.samples.setdefault(loader, set()).add(sample)

    def on_train_start(self, trainer: Any) -> None:
        if not hasattr(trainer, "exclude_samples"):
            raise OptionError(
                f"{WHO} works in a fit of hookline.Trainer: another trainer or loop reads its own data."
            )
        for loader, samples in self.samples.items():
            trainer.exclude_samples(sorted(samples), loader or self.loader, reason=WHO)
