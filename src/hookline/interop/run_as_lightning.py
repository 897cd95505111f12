"""Run a Lightning program with Hookline's trainer: import this module before Lightning.

>>> import hookline.interop.run_as_lightning
>>> from lightning.pytorch import Trainer  # Hookline's

Only the class `Trainer` is replaced, also in `lightning` and `pytorch_lightning`.
`hookline run --as lightning SCRIPT` does the same without a line in the script.
"""

from __future__ import annotations

from hookline.interop.import_lines import replace_lightning_trainer

replace_lightning_trainer()
