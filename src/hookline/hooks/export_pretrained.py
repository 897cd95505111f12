"""Export the best and the last model of a run in the format of transformers."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor, nn

from hookline.distributed.sharded_norms import is_sharded
from hookline.engine.checks import OnDisk, Several, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.util.errors import HookError, OptionError, closest

log = logging.getLogger("hookline")
WHO = "ExportPretrained"


class ExportPretrained(Hook):
    """Exports model, configuration and tokenizer with `save_pretrained`, for `from_pretrained`.

    An export is made from a checkpoint that is durable, so it never differs from it: `pretrained/best` from
    the best one of a `ModelCheckpoint(monitor=...)`, whenever there is a new best, and `pretrained/last` from
    the last one when the fit ends. Each is replaced as a whole; a kill leaves the old one or the new one. If
    evaluations use averaged weights, these are exported. Of a PEFT model the adapter is exported.
    """

    tier = "monitor"
    observes = True
    order = 250  # after ModelCheckpoint, which decides what is the best
    ranks = "zero"

    @checked_parameters
    def __init__(
        self,
        processing_class: Any = None,
        model: str | None = None,
        monitor: str | None = None,
        at: Annotated[tuple[str, ...], Several(("best", "last"))] = ("best", "last"),
        dirpath: Annotated[str | Path, OnDisk()] = "pretrained",
        name: str | None = None,
    ) -> None:
        """Choose what to export.

        processing_class: the tokenizer or processor, any object with `save_pretrained`; text: the name of an
        attribute of the module that holds it. model: the name of the submodule to export,
        if several have `save_pretrained`. monitor: the metric of the ModelCheckpoint that decides what is the
        best, if there are several. at: 'best', 'last' or both. dirpath: a folder inside the run's directory.
        """
        super().__init__(name)
        if processing_class is not None and not isinstance(processing_class, str):
            _check_saves(processing_class, "processing_class")
        for option, value in (("model", model), ("monitor", monitor)):
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise OptionError(f"{WHO}: {option}={value!r} must be a name.", option=option, value=value)
        self.processing_class, self.model, self.monitor, self.at = processing_class, model, monitor, at
        self.dirpath = Path(dirpath)
        if self.dirpath.is_absolute() or ".." in self.dirpath.parts or not self.dirpath.parts:
            raise OptionError(
                f"{WHO}: dirpath={str(dirpath)!r} must be a folder inside the run's directory, relative to "
                "it.",
                option="dirpath",
                value=str(dirpath),
            )
        self._prefix = ""
        """The name of the exported submodule, with a period; empty for the module itself."""
        self._module: nn.Module | None = None
        self._processor: Any = None
        self._kept: ModelCheckpoint | None = None
        self._last: Path | None = None

    # ---- before the first step -----------------------------------------------------------------------------

    def setup(self, stage: str, hooks: Any, state: Any) -> None:
        if stage != "fit":
            return
        trainer = state.trainer
        if not hasattr(trainer, "export_folder"):
            raise OptionError(
                f"{WHO} works in a fit of hookline.Trainer. In another trainer or loop call "
                "model.save_pretrained(folder) after it."
            )
        others = [each for each in hooks if isinstance(each, ExportPretrained) and each is not self]
        if any(each.dirpath == self.dirpath for each in others):
            raise HookError(
                f"Two {WHO}s would replace each other's exports: give one another dirpath, such as "
                "dirpath='student'."
            )
        self._kept = self._find_monitor(hooks) if "best" in self.at else None
        writes_last = trainer.options.saving.last or any(
            isinstance(each, ModelCheckpoint) and each.save_last for each in hooks
        )
        if "last" in self.at and not writes_last:
            raise OptionError(
                f"{WHO} exports the last checkpoint of a run, and checkpoint=False writes none: remove it, "
                "or pass at='best'."
            )
        self._last = None

    def _find_monitor(self, hooks: Any) -> ModelCheckpoint | None:
        """Return the ModelCheckpoint that decides what is the best; None if there is none."""
        candidates = [
            each for each in hooks if isinstance(each, ModelCheckpoint) and each.monitor and each.save_top_k
        ]
        monitors = [str(each.monitor) for each in candidates]
        wanted = [each for each in candidates if self.monitor in (None, each.monitor)]
        if len(wanted) > 1:
            raise OptionError(
                f"{WHO}: several ModelCheckpoints keep the best by {', '.join(monitors)}. Name one: "
                f"monitor={monitors[0]!r}."
            )
        if not wanted and (self.monitor is not None or "last" not in self.at):
            raise OptionError(
                f"{WHO}: no ModelCheckpoint monitors {self.monitor!r}.{closest(self.monitor, monitors)} "
                f"They monitor: {', '.join(monitors)}."
                if self.monitor is not None and monitors
                else f"{WHO} exports the best checkpoint of a ModelCheckpoint with a monitor, and there is "
                f"none: add ModelCheckpoint(monitor={self.monitor or 'val/loss'!r})."
            )
        return next(iter(wanted), None)

    def on_fit_start(self, module: nn.Module, trainer: Any, hooks: Any) -> None:
        self._module = module
        name = self._find_model(module)
        self._prefix = f"{name}." if name else ""
        self._processor = self._find_processor(module)
        self._refuse_missing_shards(module.get_submodule(name), trainer.options.saving.weights, hooks)

    def _refuse_missing_shards(self, model: nn.Module, wanted: str, hooks: Any) -> None:
        """Raise if an export needs frozen weights that are neither in the checkpoint nor on this rank."""
        sources = [
            each
            for each in hooks
            if isinstance(each, ModelCheckpoint) and (each is self._kept or each.save_last)
        ]
        settings = {wanted, *(each.weights or wanted for each in sources)}
        if "trainable" not in settings or hasattr(model, "peft_config"):
            return
        if any(is_sharded(each) for each in model.parameters() if not each.requires_grad):
            raise OptionError(
                f"{WHO} writes all weights of {type(model).__name__}, but checkpoints with "
                "weights='trainable' leave out the frozen ones, which FSDP has sharded over the ranks. Pass "
                "weights='all'."
            )

    def _find_model(self, module: nn.Module) -> str:
        """Return the name of the submodule to export; empty for the module itself."""
        if self.model is not None:
            known = dict(module.named_modules())
            if self.model not in known:
                raise OptionError(
                    f"{WHO}: model={self.model!r} is not a submodule of {type(module).__name__}."
                    f"{closest(self.model, known)} With save_pretrained: "
                    f"{', '.join(filter(None, _outermost(module))) or 'none'}.",
                    option="model",
                    value=self.model,
                )
            found = [self.model]
            _check_saves(known[self.model], f"model={self.model!r}")
        else:
            found = _outermost(module)
        if not found:
            raise OptionError(
                f"{WHO} exports models of transformers or peft, and neither {type(module).__name__} nor a "
                "submodule of it has the method save_pretrained."
            )
        if len(found) > 1:
            raise OptionError(
                f"{WHO}: several submodules of {type(module).__name__} have save_pretrained: "
                f"{', '.join(found)}. Name the one to export: model={found[0]!r}."
            )
        model = module.get_submodule(found[0])
        taken = inspect.signature(model.save_pretrained).parameters  # type: ignore[arg-type]
        if "state_dict" not in taken and not hasattr(model, "peft_config"):
            raise OptionError(
                f"{WHO}: {type(model).__name__}.save_pretrained has no argument state_dict, which takes "
                "the weights of a checkpoint. Models of transformers and peft have it."
            )
        return found[0]

    def _find_processor(self, module: nn.Module) -> Any:
        if not isinstance(self.processing_class, str):
            return self.processing_class
        found = getattr(module, self.processing_class, None)
        if found is None:
            raise OptionError(
                f"{WHO}: {type(module).__name__} has no attribute {self.processing_class!r}, which "
                f"processing_class names.{closest(self.processing_class, vars(module))}",
                option="processing_class",
                value=self.processing_class,
            )
        _check_saves(found, f"processing_class={self.processing_class!r}")
        return found

    # ---- exports -------------------------------------------------------------------------------------------

    def on_checkpoint_load(self, path: Path | str) -> None:
        self._last = path if isinstance(path, Path) else None

    def on_train_start(self, state: Any) -> None:
        self._export_best(state.trainer)  # the process may have ended between a checkpoint and its export

    def on_checkpoint_save(self, state: Any, path: Path | str, reason: str) -> None:
        if reason == "last" and isinstance(path, Path):
            self._last = path
        if self._kept is not None and str(path) == self._kept.best_model_path:
            self._export_best(state.trainer)

    def on_fit_end(self, state: Any) -> None:
        if state.status in ("preempted", "interrupted"):  # it resumes in another process, and time is short
            return
        self._export_best(state.trainer)
        if "last" in self.at and self._last is not None:
            self._export(state.trainer, self._last, "last")

    def teardown(self) -> None:
        self._module = self._processor = None

    def _export_best(self, trainer: Any) -> None:
        if self._kept is not None and self._kept.best_model_path:
            self._export(trainer, self._kept.best_model_path, "best")

    def _export(self, trainer: Any, checkpoint: Path | str, name: str) -> None:
        folder = Path(trainer.run_dir) / self.dirpath / name
        try:
            trainer.export_folder(checkpoint, folder, self._write)
        except Exception as error:  # the checkpoint has the weights, so the run need not end
            log.warning(
                "%s: %s could not be written from the checkpoint %s: %s: %s. The run continues.",
                WHO,
                folder,
                checkpoint,
                type(error).__name__,
                error,
            )

    def _write(self, weights: Mapping[str, Any], folder: Path) -> None:
        assert self._module is not None
        model: Any = self._module.get_submodule(self._prefix.removesuffix("."))
        own = model.state_dict()
        state = {
            name.removeprefix(self._prefix): value
            for name, value in weights.items()
            if name.startswith(self._prefix) and isinstance(value, Tensor)
        }
        for name, value in own.items():
            if name not in state and isinstance(value, Tensor):  # a checkpoint of the trained weights only
                state[name] = value
        with _without_bars():
            model.save_pretrained(str(folder), state_dict=state)
        if self._processor is not None:
            self._processor.save_pretrained(str(folder))


def _check_saves(given: Any, what: str) -> None:
    if inspect.isclass(given) or not callable(getattr(given, "save_pretrained", None)):
        shown = given.__name__ if inspect.isclass(given) else type(given).__name__
        raise OptionError(f"{WHO}: {what} must be an object with the method save_pretrained, not {shown}.")


def _outermost(module: nn.Module) -> list[str]:
    """Return the names of the submodules with `save_pretrained` that are not inside another one."""
    found: list[str] = []
    for name, each in module.named_modules():
        inside = any(name.startswith(f"{other}.") or not other for other in found)
        if not inside and callable(getattr(each, "save_pretrained", None)):
            found.append(name)
    return found


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers, which would break into the run's own."""
    bars: Any = sys.modules.get("transformers.utils.logging")
    if bars is None or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
