"""Where loaders come from: what was passed, the data module, the module; each asked for once, when first needed."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import fields

from hookline.data.loaders import Loader, make_loaders
from hookline.data.mixed import MixedLoader
from hookline.data.mixing import Mixture
from hookline.errors import OptionError, closest
from hookline.listener import overrides
from hookline.loops.run import Run
from hookline.steps import PlainSteps

log = logging.getLogger("hookline")
STEP_OF = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}


def load(run: Run, kind: str) -> list[Loader]:
    """The loaders of one kind, made when first asked for."""
    if kind in run.loaders:
        return run.loaders[kind]
    options = run.options
    limit = {
        "train": options.limit_train_batches,
        "val": options.limit_val_batches and (options.overfit_batches or options.limit_val_batches),
        "test": options.limit_test_batches, "predict": options.limit_predict_batches,
    }[kind]  # fmt: skip
    given = run.given_loaders.get(kind)
    if given is None and (kind != "val" or limit != 0):
        ask = {
            "train": run.plan.train_dataloader, "val": run.plan.val_dataloader,
            "test": run.plan.test_dataloader, "predict": run.plan.predict_dataloader,
        }[kind]  # fmt: skip
        given = ask(run.state)
    loaders = make_loaders(given, limit, kind)
    if kind == "val":
        if limit != 0 and len(loaders) > 1:
            for name in [each.name for each in loaders if each.length == 0]:
                log.warning("The validation loader %r is empty; it is left out.", name)
        loaders = [each for each in loaders if each.length != 0]
    if kind == "train" and options.overfit_batches:
        loaders = [_frozen(each) for each in loaders]
    _check(run, kind, loaders)
    run.loaders[kind] = loaders
    if kind == "train":
        settle_training(run, loaders)
    return loaders


def settle_training(run: Run, loaders: list[Loader]) -> None:
    """One loader stays itself; several become one that draws from them as the mixture says."""
    asked = run.mixture is not None or getattr(run.datamodule, "mixture", None) is not None
    if run.options.limit_train_batches == 0 or (len(loaders) == 1 and not asked):
        run.train = loaders[0]
        return
    mixture = mixture_of(run)
    run.train, run.mixes = MixedLoader(loaders, mixture, run.count_tokens), True
    s, log = run.state, run.state.log

    def picked(index: int, name: str) -> None:
        s.dataloader_idx, s.dataloader_name, log.loader = index, name, name

    run.train.picked = picked
    run.train.changed = lambda text: s.logger.add_text("mixture", text, s.step)
    if mixture.loss_weights:
        if not run.steps.automatic_optimization:
            raise OptionError("Mixture: loss_weights are applied before backward, which manual optimization does itself.")
        run.loss_weights = LossWeights(mixture.loss_weights, run.train)


class LossWeights:
    """The weight of a loader's losses by its number; loaders may come late."""

    def __init__(self, weights: Mapping[str, float], mixed: MixedLoader) -> None:
        self._weights, self._mixed = weights, mixed
        self._known: dict[int, float] = {}

    def __getitem__(self, index: int) -> float:
        if index not in self._known:
            self._known[index] = self._weights.get(self._mixed.cursor.names[index], 1.0)
        return self._known[index]


def mixture_of(run: Run) -> Mixture:
    """How several training loaders are mixed: what fit was given, or the data module's `mixture`; both may be a table."""
    given = run.mixture if run.mixture is not None else getattr(run.datamodule, "mixture", None)
    if given is None or isinstance(given, Mixture):
        return given or Mixture()
    if not isinstance(given, Mapping):
        raise OptionError(f"mixture= takes a hookline.Mixture or a table of its settings, not {type(given).__name__}.")
    known = [each.name for each in fields(Mixture)]
    for name in given:
        if name not in known:
            raise OptionError(f"Mixture has no setting {name!r}.{closest(str(name), known)} Settings: {', '.join(known)}.")
    return Mixture(**given)


def estimated_steps(run: Run) -> float:
    """Optimizer updates this run will make; infinite if that cannot be known."""
    load(run, "train")
    options, loader = run.options, run.train
    assert options.max_epochs is not None
    steps = math.inf
    if options.max_epochs >= 0 and loader.length is not None:
        steps = math.ceil(loader.length / options.accumulate_grad_batches) * options.max_epochs
    return min(steps, options.max_steps) if options.max_steps >= 0 else steps


def _frozen(loader: Loader) -> Loader:
    """The first batches, drawn once, so that every epoch overfits on the same ones."""
    batches = list(itertools.islice(loader.batches(), loader.length))
    return Loader(loader.name, batches, len(batches))


def _check(run: Run, kind: str, loaders: list[Loader]) -> None:
    name = type(run.module).__name__
    if kind == "train" and not loaders:
        raise OptionError(f"fit needs a training loader, and got none: pass it to fit, or return it from "
                          f"{name}.train_dataloader or a DataModule.")  # fmt: skip
    if kind in ("test", "predict") and not loaders:
        raise OptionError(f"{kind} needs a loader: pass it to {kind}, or return it from {name}.{kind}_dataloader "
                          "or a DataModule.")  # fmt: skip
    empty = [each.name for each in loaders if each.length == 0]
    if kind == "train" and run.options.limit_train_batches != 0 and empty:
        raise OptionError(f"The training loader {empty[0]!r} is empty.")
    step = STEP_OF[kind]
    if loaders and kind != "predict" and not isinstance(run.steps, PlainSteps) and not overrides(run.steps, step):
        raise OptionError(f"There is a {kind} loader, but {name} has no {step}(self, batch, batch_idx).")
