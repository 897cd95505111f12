"""Lightning's `Trainer`, `LightningModule`, `LightningDataModule` and `Callback`: change the import line, and
code runs.

Their objects in our loop. Code that imports from here: `trainer`, `callbacks`, `modules`, `hparams`,
`loaders`, `tuning`. Objects of the installed package in `hookline.Trainer`: `adopted_callback`,
`adopted_module`, `trainer_view`, `trainer_parts`, `loop_parts`, `binder`. Both use `table` and `names`.

Our hooks in their loop: `host`. Lightning need not be installed for the first group.
"""

from __future__ import annotations

from typing import Any

from hookline.engine.registry import import_instead
from hookline.interop.lightning.modules import Callback, LightningDataModule, LightningModule
from hookline.interop.lightning.stage_loaders import seed_everything
from hookline.interop.lightning.table import MAPPING
from hookline.interop.lightning.trainer import Trainer
from hookline.interop.lightning.tuning import Tuner

__all__ = [
    "MAPPING",
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "Tuner",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    """Return `callbacks`, or a callback of it, which is imported when it is first used."""
    advice = import_instead(__name__, name)
    # a submodule, or a name of Python's import system
    if advice or (name != "callbacks" and not name[:1].isupper()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
    import hookline.interop.lightning.callbacks as callbacks  # `from ... import` would call this function

    return callbacks if name == "callbacks" else getattr(callbacks, name)
