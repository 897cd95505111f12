"""Trials beside a run: a short fit with one hook, and a few batches of another size."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from hookline.data.batch import batch_size
from hookline.data.batch_size import why_fixed, with_batch_size
from hookline.data.loaders import Loader, make_loaders
from hookline.data.seeding import isolated_rng, put_back, states_of
from hookline.data.sharding import END, units_of
from hookline.data.sources import has_state
from hookline.run.module import PlainSteps
from hookline.run.run import Run
from hookline.training.backward import loss_of
from hookline.training.batch_events import set_outputs, take_batch, transfer
from hookline.training.composition import choose_step
from hookline.training.loading import sharding_of
from hookline.training.participants import attach_run
from hookline.training.ranks.data_pass import separate_log
from hookline.training.rules import LoopRules
from hookline.training.step import TrainStep
from hookline.training.update import run_training_step
from hookline.util.errors import HooklineError, OptionError
from hookline.util.memory import is_out_of_memory

SHORT: Mapping[str, Any] = {
    "max_epochs": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "enable_progress_bar": False,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "checkpoint": False,
    "digest": False,
}
"""Options of a short fit, which saves and validates nothing."""
FITS, ENDED, FULL = 0, 1, 2
"""How a batch of a trial went, from good to bad; the worst of all ranks counts."""


class ShortFitRules(LoopRules):
    """Decisions of a short fit, which does not validate."""

    advances_on_metrics = False


def fit_aside(
    trainer: Any, hook: Any, options: Mapping[str, Any], module: nn.Module, train: Any, **arguments: Any
) -> None:
    """Run a short fit with a trainer like this one and one hook only, also inside a run of this trainer.

    The random streams and the modes of submodules are restored; the hook restores everything else.
    """
    outer: Run | None = trainer._run
    modes = [(each, each.training) for each in module.modules()]
    with isolated_rng(), tempfile.TemporaryDirectory() as directory:
        own = {**asdict(trainer.options), **SHORT, "run_dir": directory, **options}
        short = type(trainer)(**own, strategy=trainer.strategy, logger=False, hooks=[hook])
        short.shows_model = False
        short.rules = ShortFitRules()
        try:
            short.fit(module, train, **arguments)
        finally:
            for layer, mode in modes:
                layer.training = mode
            if outer is not None:
                attach_run(outer, outer)


# ---- the batch size of a run -------------------------------------------------------------------------------


class BatchSizes:
    """The batch size of a run's training loader: find out, try and set it.

    A loader that was passed to `fit` is copied with another batch size. A loader that comes from
    train_dataloader is made again, if its module or data module has an attribute `batch_size`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `fit` that made this run, without the module."""
        run = self.run
        data = getattr(run.datamodule, "original", run.datamodule)
        return {
            "train": run.data.given.get("train"),
            "datamodule": data,
            **(run.steps.arguments() if isinstance(run.steps, PlainSteps) else {}),
        }

    def set(self, size: int) -> None:
        """Let the training loader have this batch size. Call it before the loader is made, in `setup`."""
        run, owner = self.run, self._owner()
        if "train" in run.data.loaders:
            raise HooklineError("The batch size can be set until the training loader is made, in `setup`.")
        if owner is None:
            run.data.batch_size = size
        else:
            owner.batch_size = size

    def check(self) -> None:
        """Refuse a run in which no batch size can be tried, because of its loader or because of its ranks."""
        if self._owner() is None and (why := why_fixed(self._source())):
            raise OptionError(
                f"The training loader {why}, so its batch size cannot be changed. Pass a DataLoader(dataset, "
                "batch_size=...), or return the loader from train_dataloader of a module or data module that "
                "makes it with self.batch_size."
            )
        if not self.run.strategy.ranks.alone and (why := _communicates(self.run)):
            raise OptionError(
                f"A batch size cannot be tried on several ranks if single batches communicate, and {why}: "
                "the other ranks would wait for a rank that runs out of memory. Find the size on one device, "
                "with BatchSizeFinder().find(...)."
            )

    def largest(self) -> int | None:
        """Return how many samples each rank can have in a batch; None if the data has no length."""
        loader = self.run.data.loaders["train"][0]
        if why_fixed(loader.source):
            return None
        samples = units_of(loader.source, loader.shard_plan, trains=True)
        return None if samples is None else max(1, samples // loader.shard_plan.world_size)

    def fits(self, size: int, batches: int) -> bool:
        """Train on a few batches of this size; return whether they fit into the memory of every rank.

        Batches do not communicate, and all ranks compare how each batch went. So a rank that runs out of
        memory makes no other rank wait.
        """
        run, s = self.run, self.run.state
        (loader,) = make_loaders(self._resized(size), 1.0, "train", sharding_of(run, "train"))
        loader.agree()
        run.step = step = choose_step(run)
        worst = number = 0
        try:
            with separate_log(s), _reading(loader) as source:
                s.log.mode = "train"
                while worst == FITS and number < batches:
                    run.strategy.sync_gradients(False)
                    run.strategy.reopen_window()  # without a broadcast of buffers
                    worst = run.strategy.ranks.largest([_try_batch(run, step, source, number)]).read()[0]
                    number += worst == FITS
        finally:
            _release(run, step)
        return worst == FITS or (worst == ENDED and number > 0)

    def _owner(self) -> Any:
        """Return the data module or module whose `batch_size` train_dataloader uses; None: there is none."""
        run = self.run
        if run.data.given.get("train") is not None:
            return None
        owners = (getattr(run.datamodule, "original", run.datamodule), run.module)
        return next((each for each in owners if type(getattr(each, "batch_size", None)) is int), None)

    def _source(self) -> Any:
        loaders = self.run.data.loaders["train"]
        if self.run.data.is_mixture:
            raise OptionError(
                f"The run mixes {len(loaders)} training loaders, and a batch size can be found for one: "
                "search it for each of them with BatchSizeFinder().find(trainer, module, loader)."
            )
        return loaders[0].source

    def _resized(self, size: int) -> Any:
        """Return the training loader with another batch size."""
        run, owner = self.run, self._owner()
        if owner is None:
            return with_batch_size(self._source(), size)
        before, owner.batch_size = owner.batch_size, size
        try:
            source = run.plan.train_dataloader(run.state)
        finally:
            owner.batch_size = before
        found = getattr(source, "batch_size", None)
        if found not in (size, None):
            raise OptionError(
                f"{type(owner).__name__}.batch_size is {size}, but the training loader has batches of "
                f"{found}: make it in train_dataloader with batch_size=self.batch_size."
            )
        return source


def _communicates(run: Run) -> str:
    """Return what communicates in a single batch, as a part of a sentence; empty if nothing does."""
    if run.strategy.forward_communicates:
        return f"the forward pass of {type(run.strategy).__name__} does"
    if run.traits.is_manual:
        return "manual optimization averages gradients in the training step"
    if any(isinstance(each, nn.SyncBatchNorm) for each in run.module.modules()):
        return "SyncBatchNorm does"
    if getattr(run.strategy, "options", {}).get("static_graph"):
        return "the first batch with static_graph=True does"
    return ""


def _try_batch(run: Run, step: TrainStep, source: Iterator[Any], number: int) -> int:
    """Train on the next batch; return how that went."""
    try:
        batch = next(source, END)
        if batch is END:
            return ENDED
        _train_on(run, step, batch, number)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return FULL
    return FITS


def _train_on(run: Run, step: TrainStep, batch: Any, number: int) -> None:
    """Do with a batch what uses memory in training: move it, forward, backward, update."""
    s = run.state
    s.cache.clear()
    take_batch(s, batch, number)
    s.log.weight = batch_size(batch)
    transfer(run.plan, s, run.traits.transfers)
    run_training_step(run)
    if not run.traits.is_manual:
        loss = loss_of(run, s.current.returned)
        if loss is None:
            return
        step.update.clear_gradients()
        step.backward(loss)
        del loss
        for index, optimizer in enumerate(s.setup.optimizers):
            step.update.focus(index, optimizer)
            step.update.step()
    set_outputs(s, None)


@contextlib.contextmanager
def _reading(loader: Loader) -> Iterator[Iterator[Any]]:
    """Yield the batches of a loader; then restore its generators and its dataset, and end its workers."""
    dataset: Any = getattr(loader.source, "dataset", None)
    state = copy.deepcopy(dataset.state_dict()) if has_state(dataset) else None
    generators = {**loader.reader.generators, **getattr(loader.reader, "current", {})}
    before = states_of(generators)
    try:
        yield loader.open(0, 0, 0)
    finally:
        loader.close()
        put_back(generators, before)
        if state is not None:
            dataset.load_state_dict(state)


def _release(run: Run, step: TrainStep) -> None:
    """Free the memory of a trial: its tensors, what cycles hold, and what the allocator has cached."""
    step.backward.release()
    take_batch(run.state, None, 0)
    set_outputs(run.state, None)
    run.state.cache.clear()
    for parameter in run.module.parameters():
        parameter.grad = None
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if run.options.compile and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # graphs for this size would change those of later ones
