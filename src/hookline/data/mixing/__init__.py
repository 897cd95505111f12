"""Choose the loader of each batch of a mixture: settings, checks, a pure schedule, and a cursor on it.

`Mixture` has the settings. `check_mixture` refuses invalid ones before the first batch. `schedule` yields the
picks of an epoch from any position, `planned` counts them without drawing, `describe_mixture` returns both as
text. `MixtureCursor` belongs to a run: it returns one pick at a time, can be changed during the run, and
resumes exactly from a saved state.

The picks depend only on the settings, the lengths of the loaders and the epoch. No global random state is
used, and all ranks compute the same picks without communication.
"""

from hookline.data.mixing.cursor import MixtureCursor, check_mixture
from hookline.data.mixing.schedule import (
    Pick,
    Proportion,
    describe_mixture,
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
    "check_mixture",
    "describe_mixture",
    "epoch_batches",
    "make_mixture",
    "planned",
    "proportions",
    "schedule",
]
