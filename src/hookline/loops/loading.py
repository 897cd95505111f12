"""Where loaders come from: what was passed, the data module, the module; each asked for once, when first needed."""

from __future__ import annotations

import itertools
import math

from hookline.data.loaders import Loader, make_loaders
from hookline.errors import OptionError
from hookline.listener import overrides
from hookline.loops.run import Run
from hookline.steps import PlainSteps

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
        loaders = [each for each in loaders if each.length != 0]
    if kind == "train" and options.overfit_batches:
        loaders = [_frozen(each) for each in loaders]
    _check(run, kind, loaders)
    run.loaders[kind] = loaders
    return loaders


def estimated_steps(run: Run) -> float:
    """Optimizer updates this run will make; infinite if that cannot be known."""
    options, loader = run.options, load(run, "train")[0]
    assert options.max_epochs is not None
    steps = math.inf
    if options.max_epochs >= 0 and loader.length is not None:
        steps = math.ceil(loader.length / options.accumulate_grad_batches) * options.max_epochs
    return min(steps, options.max_steps) if options.max_steps >= 0 else steps


def _frozen(loader: Loader) -> Loader:
    """The first batches, drawn once, so that every epoch overfits on the same ones."""
    batches = list(itertools.islice(iter(loader.source), loader.length))
    return Loader(loader.name, batches, len(batches))


def _check(run: Run, kind: str, loaders: list[Loader]) -> None:
    name = type(run.module).__name__
    if kind == "train" and len(loaders) != 1:
        raise OptionError(f"fit needs one training loader, and got {len(loaders)}: pass it to fit, or return it from "
                          f"{name}.train_dataloader or a DataModule.")  # fmt: skip
    if kind in ("test", "predict") and not loaders:
        raise OptionError(f"{kind} needs a loader: pass it to {kind}, or return it from {name}.{kind}_dataloader "
                          "or a DataModule.")  # fmt: skip
    if kind == "train" and run.options.limit_train_batches != 0 and loaders[0].length == 0:
        raise OptionError(f"The training loader {loaders[0].name!r} is empty.")
    step = STEP_OF[kind]
    if loaders and kind != "predict" and not isinstance(run.steps, PlainSteps) and not overrides(run.steps, step):
        raise OptionError(f"There is a {kind} loader, but {name} has no {step}(self, batch, batch_idx).")
