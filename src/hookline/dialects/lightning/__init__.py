"""Lightning's `Trainer`, `LightningModule`, `LightningDataModule` and `Callback`: change the import line, and
code runs.

Lightning itself need not be installed. Its own classes, where it is, go into `hookline.Trainer` as they are:
see `hookline.dialects.adopted`.
"""

from __future__ import annotations

from hookline.dialects.lightning.modules import Callback, LightningDataModule, LightningModule
from hookline.dialects.lightning.table import MAPPING
from hookline.dialects.lightning.trainer import Trainer

__all__ = ["MAPPING", "Callback", "LightningDataModule", "LightningModule", "Trainer"]
