"""Which of several named loaders gives the next batch: settings, checks, the schedule as a pure function, and
a cursor on it.

`Mixture` holds the settings. `check` refuses what cannot work, before the first batch. `schedule` yields the
picks of an epoch from any position, `planned` counts them without drawing, `describe` puts both into words.
`MixtureCursor` is what a run holds: it hands out one pick at a time, can be revised while it runs, and goes
on from a saved state as if it had never stopped.

Everything is decided by the settings, the lengths of the loaders and the epoch. No global random state is
read or moved, and every process of a distributed run comes to the same picks by itself.
"""

from hookline.data.mixing.cursor import MixtureCursor, check
from hookline.data.mixing.schedule import (
    Pick,
    Proportion,
    describe,
    epoch_batches,
    planned,
    proportions,
    schedule,
)
from hookline.data.mixing.settings import Mixture, make_mixture

__all__ = [
    "Mixture",
    "MixtureCursor",
    "Pick",
    "Proportion",
    "check",
    "describe",
    "epoch_batches",
    "make_mixture",
    "planned",
    "proportions",
    "schedule",
]
