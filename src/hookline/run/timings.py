"""The time spent in each part of a fit: seconds, shares, a line of text and a log record."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.engine.cost import format_seconds

TIMED_PARTS = ("training", "data", "validation", "saving", "hooks")
"""The parts, which add up to the total; `hooks` is missing if hooks were not measured."""
SAMPLED = ("forward", "backward", "optimizer")
"""Parts of `training`, estimated from a few steps."""
LEAST_SHARE = 0.005
"""A part with a smaller share is not in the line."""
ENOUGH_SAMPLES = 10
"""The number of sampled batches that the line needs to show `SAMPLED`, because first steps are untypical."""
UNEVEN = 0.05
"""The line names the rank that waited longest for data if its share is larger by this."""
PART_WORDS = {"data": "waiting for data"}


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that this process has spent in each part of a fit. The parts do not overlap."""

    total: float
    """Seconds since set-up was complete."""
    data: float
    """Seconds in which the training loop waited for its loader."""
    validation: float
    """Seconds in validation, its data and its hooks included."""
    saving: float
    """Seconds in which the loop waited for checkpoints, the hooks of these events included."""
    hooks: float | None
    """Seconds in hooks outside of validation and saving. None if the trainer does not measure hooks
    (`Trainer(audit={"costs": False})`).
    """
    batches: int = 0
    """Training batches of this process."""
    forward: float | None = None
    """Estimated seconds in `training_step`, or None before the first sample."""
    backward: float | None = None
    """Estimated seconds in backward, or None before the first sample."""
    optimizer: float | None = None
    """Estimated seconds in gradient clipping and the optimizer, or None before the first sample."""
    sampled_batches: int = 0
    """Training batches that the three estimates come from."""
    longest_wait: float | None = None
    """Seconds in which the rank that waited longest for its loader did so; None with one process, and before
    the end of the fit.
    """
    longest_wait_rank: int | None = None
    """That rank."""

    @property
    def training(self) -> float:
        """Seconds of everything else: the training steps, logging and the loop itself."""
        return max(0.0, self.total - self.data - self.validation - self.saving - (self.hooks or 0.0))

    def share(self, part: str) -> float:
        """Return a part's share of the total, from 0 to 1; 0 for a part that was not measured."""
        seconds: float | None = getattr(self, part)
        return seconds / self.total if seconds and self.total else 0.0

    def record(self) -> dict[str, float | int | None]:
        """Return all figures, as the log has them; those about ranks only if there are several."""
        of_ranks = () if self.longest_wait is None else ("longest_wait", "longest_wait_rank")
        return {
            name: getattr(self, name)
            for name in ("total", *TIMED_PARTS, *SAMPLED, "batches", "sampled_batches", *of_ranks)
        }

    def __str__(self) -> str:
        """Return one line: `62.0 s = 71% training (forward 22%, ...), 18% waiting for data, ...`."""
        # hooks inside validation and saving count there; without this text the line would contradict the
        # table of hook costs
        apart = self.hooks is not None and max(self.share("validation"), self.share("saving")) >= LEAST_SHARE
        words = {**PART_WORDS, "hooks": "hooks outside validation and saving"} if apart else PART_WORDS
        always = {"training", "data", *(["hooks"] if apart else [])}
        parts = [
            f"{_percent(self.share(part))} {words.get(part, part)}{self._inside(part)}"
            for part in TIMED_PARTS
            if part in always or self.share(part) >= LEAST_SHARE
        ]
        return f"{format_seconds(self.total)} = {', '.join(parts)}"

    def _inside(self, part: str) -> str:
        if part == "data" and self.share("longest_wait") - self.share("data") >= UNEVEN:
            return f" (rank {self.longest_wait_rank}: {_percent(self.share('longest_wait'))})"
        if part != "training" or self.forward is None or self.sampled_batches < ENOUGH_SAMPLES:
            return ""
        return f" ({', '.join(f'{each} {_percent(self.share(each))}' for each in SAMPLED)})"


def _percent(share: float) -> str:
    return "<1%" if 0 < share < LEAST_SHARE else f"{share:.0%}"
