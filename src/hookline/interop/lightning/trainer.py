"""`Trainer`: Hookline's trainer with Lightning's options, methods and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.engine.checks import check_choice
from hookline.engine.registry import hook_class
from hookline.interop.lightning.loaders import side_by_side
from hookline.interop.lightning.names import LightningNames
from hookline.metrics.metric_log import Metrics
from hookline.run.options import OLD_NAMES
from hookline.training.trainer import Trainer as HooklineTrainer
from hookline.util.errors import OptionError

DEVICES = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
"""Lightning's accelerators, and Hookline's devices."""

NO_EFFECT: dict[str, tuple[Any, str]] = {
    "enable_model_summary": (None, ""),
    "inference_mode": (None, ""),
    "benchmark": (None, ""),
    "use_distributed_sampler": (None, ""),
    "num_nodes": (1, "start the script with torchrun"),
    "profiler": (None, "add the hook hookline.hooks.Profiler"),
    "detect_anomaly": (False, "use torch.autograd.set_detect_anomaly"),
    "barebones": (False, "Hookline has no such overhead"),
    "plugins": (None, "pass strategy= or precision="),
    "sync_batchnorm": (False, "convert the module before fit"),
    "reload_dataloaders_every_n_epochs": (0, "return a loader with a dataset that changes"),
    "model_registry": (None, ""),
}
"""Options of Lightning without an effect here: the neutral value, and the alternative to another value."""


class NamedTrainer(LightningNames, HooklineTrainer):
    """Hookline's trainer with Lightning's names besides its own, for modules and callbacks of this
    dialect.
    """

    @property
    def _own(self) -> Any:
        return self


class Trainer(NamedTrainer):
    """A trainer with Lightning's options and methods on Hookline's loop.

    >>> trainer = Trainer(callbacks=[MyCallback()], max_epochs=1)
    >>> trainer.fit(model, train_dataloaders=loader)
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Any = "auto",
        enable_checkpointing: bool | None = None,
        logger: Any = True,
        **options: Any,
    ) -> None:
        """`callbacks`, all options of `hookline.Trainer`, and those of Lightning that have an effect here.

        enable_checkpointing: False is `checkpoint=False`; True also adds a `ModelCheckpoint` if there is
        none.
        """
        check_choice("accelerator", accelerator, DEVICES)
        if devices not in ("auto", 1, "1", [0]):
            raise OptionError(
                f"devices={devices!r}: a process of Hookline has one device; start several processes with "
                f"torchrun.",
                option="devices",
                value=devices,
            )
        for name, (nothing, instead) in NO_EFFECT.items():
            given = options.pop(name, nothing)
            if given not in (nothing, None) and instead:
                raise OptionError(
                    f"{name}={given!r}: Hookline has no such option; {instead}.", option=name, value=given
                )
        settings: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        settings = {
            "device": DEVICES[accelerator],
            "logger": logger if logger is not None else True,
            **settings,
        }
        if enable_checkpointing is False and not settings.keys() & {"checkpoint", *OLD_NAMES}:
            settings["checkpoint"] = False
        super().__init__(**settings)
        if enable_checkpointing and not self.checkpoint_callbacks:
            self.add_hook(hook_class("model_checkpoint")())

    # ---- stages --------------------------------------------------------------------------------------------

    def fit(  # type: ignore[override]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        **options: Any,
    ) -> Metrics:
        """Train. ckpt_path: a checkpoint, 'last' or 'best'. Further arguments are those of
        `hookline.Trainer.fit`.
        """
        train, datamodule = self._loaders_and_data(side_by_side(train_dataloaders), datamodule)
        options.setdefault("resume", _chosen(ckpt_path))
        return super().fit(model, train, val_dataloaders, datamodule=datamodule, **options)

    def validate(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        **options: Any,
    ) -> Any:
        """Measure on the validation data; return a list with a dictionary per loader, or inside a run the
        metrics themselves.
        """
        if self._run is not None:
            return super().validate()
        loaders, datamodule = self._loaders_and_data(dataloaders, datamodule)
        measured = super().validate(
            model, loaders, datamodule=datamodule, checkpoint=_chosen(ckpt_path), **options
        )
        return self._by_loader("val", measured, verbose)

    def test(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        **options: Any,
    ) -> Any:
        """Measure on the test data; return a list with a dictionary for each loader."""
        loaders, datamodule = self._loaders_and_data(dataloaders, datamodule)
        measured = super().test(
            model, loaders, datamodule=datamodule, checkpoint=_chosen(ckpt_path), **options
        )
        return self._by_loader("test", measured, verbose)

    def predict(  # type: ignore[override]
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:
        """Return the results of `predict_step`."""
        loaders, datamodule = self._loaders_and_data(dataloaders, datamodule)
        keep = True if return_predictions is None else return_predictions
        return super().predict(
            model, loaders, datamodule=datamodule, return_predictions=keep, checkpoint=_chosen(ckpt_path)
        )

    def _loaders_and_data(self, loaders: Any, datamodule: Any) -> tuple[Any, Any]:
        """Return the loaders and the data module, which may be passed in the loaders' position, and set its
        trainer.
        """
        if hasattr(loaders, "train_dataloader") and hasattr(loaders, "prepare_data"):
            loaders, datamodule = None, loaders
        if datamodule is not None:
            datamodule.trainer = self
        return loaders, datamodule

    def _by_loader(self, kind: str, measured: Metrics, verbose: bool) -> list[dict[str, float]]:
        """Return a dictionary for each loader, with its own metrics and those that belong to no loader."""
        results = dict(measured.read())
        if not results and not self.num_batches(kind):
            return []  # switched off by limit_test_batches=0
        if verbose:
            self.print("\n".join(f"{name}: {value:g}" for name, value in results.items()))
        ends = [f"/dataloader_idx_{index}" for index in range(max(1, len(self.num_batches(kind))))]
        return [
            {
                name: value
                for name, value in results.items()
                if name.endswith(end) or not name.endswith(tuple(ends))
            }
            for end in ends
        ]


def _chosen(ckpt_path: str | Path | None) -> str | Path | None:
    return "auto" if ckpt_path == "last" else ckpt_path
