"""Lightning's `Trainer`, `LightningModule`, `LightningDataModule` and `Callback`: change the import line, and
code runs.

Lightning itself need not be installed. Its own classes, where it is, go into `hookline.Trainer` as they are:
see `hookline.interop`.
"""

from __future__ import annotations

from hookline.interop.lightning.modules import Callback, LightningDataModule, LightningModule
from hookline.interop.lightning.table import MAPPING
from hookline.interop.lightning.trainer import Trainer

__all__ = ["MAPPING", "Callback", "LightningDataModule", "LightningModule", "Trainer"]
