"""The errors that Hookline raises, and the signals that a hook may return."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final


class HooklineError(Exception):
    """Base of every error that Hookline raises about itself."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows: in a notebook without the frames of Hookline."""
        from hookline.util.short_traceback import render

        return render(self, is_own=True)


class HookError(HooklineError):
    """A hook, module or strategy cannot be bound: a wrong method name, parameter, order or name."""


class MissingAttribute(HooklineError, AttributeError):
    """A trainer or data module has no attribute of this name.

    The text says what to use instead. It is made when it is read: `hasattr` discards most such errors.
    """

    def __init__(self, name: str, owner: object) -> None:
        super().__init__(name=name)  # with obj=owner, Python would add a name of its own
        self.missing, self.owner = name, owner

    def __str__(self) -> str:
        instead = (
            f" {ATTRIBUTES[self.missing]}"
            if self.missing in ATTRIBUTES
            else closest(self.missing, [each for each in dir(self.owner) if not each.startswith("_")])
        )
        return f"{type(self.owner).__name__!r} object has no attribute {self.missing!r}.{instead}"


class ArgumentError(HooklineError, TypeError):
    """A call has an argument that does not exist. The text names the nearest one."""


class OptionError(HooklineError, ValueError):
    """An invalid value or combination of values. Its attributes name the option, the value and the allowed
    values.

    message: the text. option: the invalid option, such as `max_epochs`, or `checkpoint.every` for a key of a
    table. value: its value. allowed: the allowed values, or a description of them.
    """

    def __init__(
        self, *message: object, option: str = "", value: Any = None, allowed: tuple[Any, ...] | str = ()
    ) -> None:
        super().__init__(*message)
        self.option = option
        """The invalid option: `max_epochs`, or `checkpoint.every` for a key of a table. Empty if it is not
        about one option.
        """
        self.value = value
        """The value of the option."""
        self.allowed = allowed
        """The allowed values or names, or a description of them: `("norm", "value")`, `"a whole number from
        1"`.
        """


class ObserverError(HooklineError):
    """A hook that declares that it only observes has changed something. Its error policy applies."""


class LossError(HooklineError):
    """A training step returned a value that cannot be used as a loss."""


class NonFiniteLoss(HooklineError, ArithmeticError):
    """The loss became NaN or infinite, and the run is configured to stop then."""


class HangError(HookError):
    """A call did not return in time, and the run is configured to end then. Error policies do not apply to
    it.
    """


class PeerError(HooklineError):
    """Another rank of the run has failed, so that this rank cannot continue."""


class RunLockedError(HooklineError):
    """Another job trains in the run's directory."""


class UnknownSamples(HooklineError):
    """The samples behind a step cannot be computed."""


class CheckpointError(HooklineError):
    """A checkpoint cannot be written or read."""


class StopTraining(Exception):
    """Raise it in any hook or step to end the run at the next batch boundary.

    reason: text for the log and the run record.
    """

    def __init__(self, reason: str = "StopTraining was raised") -> None:
        super().__init__(reason)
        self.reason = reason


class Preempted(SystemExit):
    """A signal has ended the run after a checkpoint and teardown.

    If it is not caught, the process exits with 128 + the signal.

    signal: its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(128 + signal)
        self.signal = signal


class Signal:
    """A value that a hook returns to steer the loop. There are exactly four, compared by identity.

    name: the name of the constant. strength: of two signals, the stronger one counts.
    """

    __slots__ = ("name", "strength")

    def __init__(self, name: str, strength: int) -> None:
        self.name = name
        self.strength = strength

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # copies and pickles stay the same object


SKIP_BATCH: Final = Signal("SKIP_BATCH", 1)
"""Returned from on_train_batch_start: skip this batch; it has no further events."""

END_EPOCH: Final = Signal("END_EPOCH", 2)
"""Returned from on_train_batch_start: end this epoch; a due validation and the epoch-end events still run."""

SKIP_STEP: Final = Signal("SKIP_STEP", 1)
"""Returned from on_before_optimizer_step: do not update; on_step_skipped("hook") fires instead."""

STEP_DONE: Final = Signal("STEP_DONE", 2)
"""Returned from on_before_optimizer_step: the hook has made the update itself; it counts."""


ELSEWHERE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "accelerator": ("device",),
        "gpu": ("cuda",),
        "ckpt_path": ("resume", "checkpoint"),
        "train_dataloaders": ("train",),
        "train_dataloader": ("train",),
        "val_dataloaders": ("val",),
        "val_dataloader": ("val",),
        "train_loader": ("train",),
        "val_loader": ("val",),
        "dataloaders": ("loaders", "train"),
        "last": ("auto",),
        "latest": ("auto",),
        "newest": ("auto",),
        "maximize": ("max",),
        "maximum": ("max",),
        "minimize": ("min",),
        "minimum": ("min",),
        "criterion": ("loss",),
        "epochs": ("max_epochs",),
        "num_epochs": ("max_epochs",),
        "num_train_epochs": ("max_epochs",),
        "steps": ("max_steps",),
        "loss_fn": ("loss",),
        "callback_metrics": ("metrics",),
        "logged_metrics": ("metrics",),
        "progress_bar_metrics": ("metrics",),
        "log_dir": ("run_dir",),
        "logging_interval": ("frequency",),
        "max_depth": ("depth",),
        "save_best_only": ("save_top_k",),
        "reduce_fx": ("reduce",),
        "training_epoch_end": ("on_train_epoch_end",),
        "validation_epoch_end": ("on_validation_epoch_end",),
        "test_epoch_end": ("on_test_epoch_end",),
        "training_step_end": ("on_train_batch_end",),
        "validation_step_end": ("on_validation_batch_end",),
        "test_step_end": ("on_test_batch_end",),
    }
)
"""Names from other systems, with their names here. Spelling alone does not lead from one to the other."""

ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enable_checkpointing": "Use 'checkpoint': checkpoint=False saves no checkpoints.",
        "enable_model_summary": "Leave it out: a summary is shown only by the hook ModelSummary.",
        "early_stopping": "Add the hook EarlyStopping: hooks=[EarlyStopping()].",
        "model_checkpoint": "Add the hook ModelCheckpoint: hooks=[ModelCheckpoint()].",
        "auto_lr_find": "Add the hook LRFinder: hooks=[LRFinder()].",
        "auto_scale_batch_size": "Add the hook BatchSizeFinder: hooks=[BatchSizeFinder()].",
        "barebones": "Use checkpoint=False, logger=False and enable_progress_bar=False.",
        "benchmark": "Set torch.backends.cudnn.benchmark = True instead.",
        "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True) instead.",
        "devices": "Leave it out: a process uses one device. For two, run torchrun --nproc-per-node 2.",
        "enable_autolog_hparams": "Leave it out: the arguments of the module are logged by the hook HParams.",
        "gpus": "Leave it out: a process uses one GPU. For two, run torchrun --nproc-per-node 2.",
        "inference_mode": "Use evaluation={'inference_mode': True}; the default is torch.no_grad.",
        "map_location": "Leave it out: the weights go to the module's device; module.to(device) moves it.",
        "num_nodes": "Start the program with torchrun --nnodes on each machine.",
        "plugins": "Use strategy= or precision=.",
        "profiler": "Add the hook Profiler: hooks=[Profiler()].",
        "reload_dataloaders_every_n_epochs": "Leave it out: use a loader whose dataset changes.",
        "resume_from_checkpoint": "Pass it to fit: trainer.fit(..., resume=PATH).",
        "save_weights_only": "Leave it out: hookline.load_weights takes the weights of any checkpoint.",
        "sync_batchnorm": "Use strategy=DDP(sync_batchnorm=True).",
        "track_grad_norm": "Add the hook GradientMonitor: hooks=[GradientMonitor()].",
        "use_distributed_sampler": "Leave it out; a loader with `shards_itself = True` is read as it is.",
    }
)
"""Options from other systems that have no counterpart of the same meaning, with what to do instead."""


CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BackboneFinetuning": "hookline.hooks.FreezeSchedule",
        "BaseFinetuning": "hookline.hooks.FreezeSchedule",
        "BasePredictionWriter": "hookline.hooks.PredictionWriter",
        "CSVLogger": "hookline.loggers.CSV",
        "Callback": "hookline.Hook",
        "Checkpoint": "hookline.hooks.ModelCheckpoint",
        "CometLogger": "hookline.loggers.Comet",
        "DDPStrategy": "hookline.DDP",
        "DeviceStatsMonitor": "hookline.hooks.DeviceStats",
        "EMA": "hookline.hooks.WeightAveraging",
        "EMAWeightAveraging": "hookline.hooks.WeightAveraging",
        "EarlyStoppingCallback": "hookline.hooks.EarlyStopping",
        "FSDPStrategy": "hookline.FSDP",
        "Fabric": "hookline.Line",
        "GradientAccumulationScheduler": "hookline.hooks.AccumulationSchedule",
        "LearningRateFinder": "hookline.hooks.LRFinder",
        "LearningRateMonitor": "hookline.hooks.LRMonitor",
        "LightningDataModule": "hookline.DataModule",
        "LightningModule": "hookline.Module",
        "MLFlowLogger": "hookline.loggers.MLflow",
        "MisconfigurationException": "hookline.OptionError",
        "OnExceptionCheckpoint": "hookline.hooks.ModelCheckpoint",
        "PrinterCallback": "hookline.hooks.ConsoleLog",
        "ProgressCallback": "hookline.hooks.ProgressBar",
        "PyTorchProfiler": "hookline.hooks.Profiler",
        "RichModelSummary": "hookline.hooks.ModelSummary",
        "RichProgressBar": "hookline.hooks.ProgressBar",
        "SpikeDetection": "hookline.hooks.SpikeGuard",
        "StochasticWeightAveraging": "hookline.hooks.WeightAveraging",
        "TQDMProgressBar": "hookline.hooks.ProgressBar",
        "TensorBoardLogger": "hookline.loggers.TensorBoard",
        "ThroughputMonitor": "hookline.hooks.Throughput",
        "TrainerCallback": "hookline.Hook",
        "WandbLogger": "hookline.loggers.WandB",
    }
)
"""Classes of other systems, with those of Hookline that do the same."""

_RANK = "Use trainer.strategy.rank; a hook can request the fact `rank`."
_HPARAMS = (
    "Leave save_hyperparameters() out, and keep the arguments that you use as attributes: self.lr = lr. Each "
    "checkpoint has the arguments of the module's __init__, and load_from_checkpoint uses them."
)
_FREEZE = "Call requires_grad_(False) of the layers, or add the hook FreezeSchedule."
_TOGGLE = "Call requires_grad_(False) of the layers that this optimizer does not train, and True afterwards."
_HOOK_KEPT = "Keep the hook in a variable: best = ModelCheckpoint(...); Trainer(hooks=[best])."
_LOGGER = "Use trainer.logger, or request the fact `logger`: it has add_scalar, add_figure, ... and `client`."
_STAGE = "Use trainer.state.stage: 'fit', 'validate', 'test' or 'predict'."

ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "all_gather": "Use trainer.strategy.reduce(value, 'mean'), or torch.distributed.all_gather.",
        "callbacks": "Use trainer.hooks; for Lightning's Tuner the hooks LRFinder and BatchSizeFinder.",
        "checkpoint_callback": f"{_HOOK_KEPT} Or call trainer.load_best().",
        "checkpoint_callbacks": f"{_HOOK_KEPT} Or call trainer.load_best().",
        "ckpt_path": "Use is_resuming; fit(resume=...) and validate(checkpoint=...) take the path.",
        "datamodule": "Keep the data module in a variable before you pass it to fit.",
        "dtype": "Use next(self.parameters()).dtype.",
        "early_stopping_callback": "Keep the hook in a variable: stopping = EarlyStopping(...).",
        "example_input_array": "Leave it out: the hook ModelSummary(shapes=True) measures a training batch.",
        "evaluating": f"{_STAGE} The module's `training` is False in an evaluation.",
        "experiment": _LOGGER,
        "fit_loop": "Use trainer.state: it has step, epoch, batch_idx, batches_seen, ...",
        "freeze": _FREEZE,
        "global_rank": _RANK,
        "history": "Use trainer.metrics, the newest values, or hookline.loggers.read_log(trainer.run_dir).",
        "hparams": _HPARAMS,
        "hparams_initial": _HPARAMS,
        "interrupted": "Use trainer.status == 'interrupted'.",
        "is_global_zero": "Use trainer.strategy.rank == 0; a hook can request the fact `rank`.",
        "is_last_batch": "Compare batch_idx + 1 with trainer.num_training_batches.",
        "lightning_module": "Use trainer.model.",
        "local_rank": "Use trainer.strategy.local_rank.",
        "log_dir": "Use trainer.run_dir.",
        "loggers": "Use self.logger, which is all loggers as one, or trainer.loggers.",
        "lr_scheduler_configs": "Use trainer.schedules.",
        "num_devices": "Use trainer.strategy.world_size.",
        "num_test_batches": "Use trainer.num_batches('test').",
        "num_val_batches": "Use trainer.num_batches('val').",
        "on_gpu": "Use self.device.type == 'cuda'.",
        "precision": "Use trainer.strategy.precision.",
        "predicting": _STAGE,
        "print": "Call print(), with several ranks only if trainer.strategy.rank == 0.",
        "sanity_checking": "Use trainer.state.sanity_checking.",
        "save": "Use trainer.save_checkpoint(path).",
        "save_dir": "Use trainer.run_dir.",
        "save_hyperparameters": _HPARAMS,
        "testing": _STAGE,
        "to_onnx": "Call torch.onnx.export(module, ...).",
        "to_torchscript": "Call torch.export.export(module, ...).",
        "toggle_optimizer": _TOGGLE,
        "toggled_optimizer": _TOGGLE,
        "train_dataloader": "Keep the loader in a variable. trainer.num_training_batches is its length.",
        "evaluate": "Use trainer.validate(module, loader) or trainer.test(module, loader).",
        "train": "Use trainer.fit(module, loader).",
        "training": f"{_STAGE} The module's `training` is True while it trains.",
        "trainer": "Request it in an event method: def setup(self, stage, trainer).",
        "tune": "Add the hook LRFinder or BatchSizeFinder.",
        "unfreeze": "Call requires_grad_(True) of the layers, or add the hook FreezeSchedule.",
        "untoggle_optimizer": _TOGGLE,
        "val_dataloaders": "Keep the loader in a variable. trainer.num_batches('val') has its length.",
        "validating": _STAGE,
        "world_size": "Use trainer.strategy.world_size; a hook can request the fact `world_size`.",
    }
)
"""Attributes of Lightning's modules, trainer and loggers that Hookline's do not have, with what to do
instead.
"""


class AdvisesOnNames:
    """A base of classes whose error for a missing attribute of another system says what to use instead."""

    __hookline_base__: ClassVar[bool] = True

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise for a missing attribute. Say what to use for a name from another system, and in a
            notebook; elsewhere Python does.
            """
            from hookline.util.terminal import in_notebook

            advised = name in ATTRIBUTES or name in ELSEWHERE or in_notebook()
            if advised and not hasattr(type(self), name):
                raise MissingAttribute(name, self)
            return object.__getattribute__(self, name)  # raises again, also the error of a property


def install_command(extra: str) -> str:
    """Return the command that installs an extra. The quotes keep shells from expanding the brackets."""
    return f'pip install "hookline[{extra}]"'


def missing_package(who: str, package: str, extra: str) -> str:
    """Return the error about an optional package that is not installed."""
    return f"{who} needs the package {package!r}: {install_command(extra)}"


def closest(name: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest allowed name, or an empty string if no name is near. For
    an option that another system has, return what to do instead.
    """
    if name in ADVICE:
        return f" {ADVICE[name]}"
    names = list(allowed)
    found = [each for each in ELSEWHERE.get(name, ()) if each in names] or difflib.get_close_matches(
        name, names, n=1, cutoff=0.6
    )
    return f" Did you mean {found[0]!r}?" if found else ""


def nearly_named(cls: type, base: type, name: str) -> str:
    """Return a hint about a method of a user's class that has nearly this name, or an empty string."""
    own = [each for each in dir(cls) if not hasattr(base, each) and not each.startswith("_")]
    found = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
    return f" If {found[0]} is meant to be it, rename it." if found else ""


WEIGHT_FILES: Final = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")
"""Endings of files with weights."""
CHECKPOINT_PLACE: Final = "A run has its checkpoints in RUN_DIR/checkpoints."


def folders_beside(path: Path) -> list[str]:
    """Return the names of the folders in the folder of a path, to suggest one of them."""
    return [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []


def missing_checkpoint(path: Path) -> str:
    """Return the error about a path at which there is no checkpoint: what is there, and where runs have
    theirs.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist: there is no directory {folder.absolute()}. {CHECKPOINT_PLACE}"
    kept = folder / "checkpoints"
    place = kept if kept.is_dir() else folder.absolute() if folder == Path() else folder
    names = sorted(
        each.name
        for each in place.iterdir()
        if each.suffix in WEIGHT_FILES or (each.is_dir() and not each.name.startswith((".", "_")))
    )
    there = f"{place} has: {', '.join(names[:20])}." if names else f"{place} has no checkpoints."
    where = "" if path.parent.name == "checkpoints" else f" {CHECKPOINT_PLACE}"
    return f"{path} does not exist.{closest(path.name, names)} {there}{where}"


def folders_with(path: Path, name: str) -> list[str]:
    """Return the last few folders, one or two levels below a path, that have a file of this name."""
    found = (file.parent for pattern in (f"*/{name}", f"*/*/{name}") for file in path.glob(pattern))
    return sorted(map(str, found))[-5:]


def described(value: Any) -> str:
    """Describe a value for an error: a small one by its repr, others by type and shape, as in `list (Tensor
    (4, 3), Tensor (4,))`.
    """
    kind = type(value).__name__
    if (shape := getattr(value, "shape", None)) is not None:
        return f"{kind} {_of_shape(shape)}"
    if isinstance(value, list | tuple) and value:
        return f"{kind} ({', '.join(map(_describe_item, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, dict) and value:
        items = [f"{key!r}: {_describe_item(each)}" for key, each in list(value.items())[:4]]
        return f"{kind} ({', '.join(items)}{', ...' if len(value) > 4 else ''})"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else kind


def _describe_item(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {_of_shape(shape)}"


def _of_shape(shape: Any) -> str:
    return str(tuple(shape)) if isinstance(shape, Iterable) else str(shape)


# ---- misspelled names --------------------------------------------------------------------------------------


LONG_WORD = 6
MOST_SLIPS = 2


def misspelling_of(name: str, known: tuple[str, ...]) -> str:
    """Return the known name that `name` is a misspelling of, or an empty string."""
    if name in known:
        return ""
    by_letters, by_length = _index_names(known)
    words = name.split("_")
    similar = (right for right, meant in by_length.get(len(words), ()) if _is_misspelled(words, meant))
    return by_letters.get(_letters_of(name)) or next(similar, "")


@functools.lru_cache(maxsize=32)
def _index_names(known: tuple[str, ...]) -> tuple[dict[str, str], dict[int, list[tuple[str, list[str]]]]]:
    """Return the names by their letters, and by their number of words."""
    by_length: dict[int, list[tuple[str, list[str]]]] = {}
    for name in known:
        by_length.setdefault(name.count("_") + 1, []).append((name, name.split("_")))
    return {_letters_of(name): name for name in reversed(known)}, by_length


def _letters_of(name: str) -> str:
    """Return the letters of a name: equal for `onStepEnd`, `On_step_end` and `on_step_end`."""
    return name.replace("_", "").lower()


def _is_misspelled(words: list[str], right: list[str]) -> bool:
    wrong = [(word, meant) for word, meant in zip(words, right, strict=True) if word != meant]
    return 0 < len(wrong) <= MOST_SLIPS and all(_is_slip(word, meant) for word, meant in wrong)


def _is_slip(word: str, meant: str) -> bool:
    """Return whether a single typing error separates the two words."""
    if word == f"{meant}s" or meant == f"{word}s":
        return False
    if len(word) == len(meant):
        wrong = [index for index, pair in enumerate(zip(word, meant, strict=True)) if pair[0] != pair[1]]
        first, last = wrong[0], wrong[-1]
        are_swapped = (
            len(wrong) == 2 and last == first + 1 and word[first : last + 1] == meant[last] + meant[first]
        )
        return are_swapped or (len(wrong) == 1 and len(meant) >= LONG_WORD)
    longer, shorter = sorted((word, meant), key=len, reverse=True)
    at = next(
        (index for index, pair in enumerate(zip(longer, shorter, strict=False)) if pair[0] != pair[1]),
        len(shorter),
    )
    if longer[at + 1 :] != shorter[at:]:
        return False
    is_doubled = at > 0 and longer[at] == longer[at - 1]
    is_inside = 0 < at < len(longer) - 1
    if longer is word:  # an additional letter at the end, as in `prepared_data`, is not a typing error
        return is_doubled or (is_inside and len(meant) >= LONG_WORD)
    return is_doubled or len(meant) >= LONG_WORD or (is_inside and len(meant) >= 4)
