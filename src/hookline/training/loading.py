"""The loaders of a run: passed by the user, or from the data module or module, made when first needed."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from torch.utils.data import RandomSampler

from hookline.data.batch import move
from hookline.data.batch_size import with_batch_size
from hookline.data.libraries import worker_loader
from hookline.data.loaders import Loader
from hookline.data.sharding import RankSharding
from hookline.data.sources import length_of
from hookline.data.workers import refuse_unimportable
from hookline.engine.foreign import adopt_data
from hookline.engine.listener import overrides
from hookline.run.module import DataModule, Module, PlainSteps
from hookline.run.run import Run
from hookline.training.batch_totals import make_totals
from hookline.training.evaluate import check_aggregation
from hookline.training.restore import restoring
from hookline.util.errors import OptionError, nearly_named

if TYPE_CHECKING:
    from hookline.data.mixing import Mixture

log = logging.getLogger("hookline")
STEP_OF = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}


def take_datamodule(loaders: dict[str, Any], datamodule: Any) -> DataModule | None:
    """Return the data module of a stage, which may be passed in place of its first loader; None: none.

    loaders: what was passed, by kind.
    """
    first, *rest = loaders
    shapes: list[Any] = [getattr(each, "shape", None) for each in loaders.values()]
    if rest and all(shapes) and len({shape[0] for shape in shapes}) == 1:
        raise OptionError(
            "fit(): the second and third argument look like inputs and targets: pass "
            "DataLoader(TensorDataset(inputs, targets), batch_size=32)."
        )
    if isinstance(given := adopt_data(loaders[first]), DataModule):
        loaders[first], datamodule = None, given
    datamodule = adopt_data(datamodule)
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise OptionError(f"datamodule= takes a hookline.DataModule, not {type(datamodule).__name__}.")
    return datamodule


def limit_of(run: Run, kind: str) -> int | float:
    """Return how many batches of each loader of a kind are used: a number, or a fraction; 0: none."""
    options = run.options
    return {
        "train": options.limit_train_batches,
        "val": options.limit_val_batches and (options.overfit_batches or options.limit_val_batches),
        "test": options.limit_test_batches,
        "predict": options.limit_predict_batches,
    }[kind]


def load(run: Run, kind: str) -> list[Loader]:
    """Return the loaders of one kind; make them at the first call."""
    if kind == "val" and run.stage == "fit" and getattr(run.steps, STEP_OF[kind], None) is None:
        run.data.loaders[kind] = []  # `module.validation_step = None` switches validation off
    if kind in run.data.loaders:
        return run.data.loaders[kind]
    limit = limit_of(run, kind)
    given = run.data.given.get(kind)
    if given is None and (kind != "val" or limit != 0):
        given = {
            "train": run.plan.train_dataloader,
            "val": run.plan.val_dataloader,
            "test": run.plan.test_dataloader,
            "predict": run.plan.predict_dataloader,
        }[kind](run.state)
        if kind == "val" and isinstance(given, list | tuple) and not given:
            given = None  # val_dataloader returned an empty list: there is no validation data
    if kind == "train" and run.data.batch_size is not None:
        given = with_batch_size(given, run.data.batch_size)
    sharding = sharding_of(run, kind)
    rules = run.traits.rules
    loaders: list[Loader] = rules.make_loaders(run, given, limit, kind, sharding)
    if kind == "val":
        empty = [each.name for each in loaders if each.length == 0 and limit != 0]
        loaders = [each for each in loaders if each.length != 0]
        if empty and not loaders and run.stage == "validate" and rules.refuses_empty_data:
            raise OptionError(
                f"The validation loader {empty[0]!r} is empty, so there is nothing to validate on."
            )
        for name in empty:
            log.warning(
                "The validation loader %r is empty; %s.",
                name,
                "it is skipped" if loaders else "there is no validation",
            )
    if kind == "train" and run.options.overfit_batches:
        loaders = [rules.overfitted(each) for each in loaders]
    _check_loaders(run, kind, loaders)
    for loader in loaders:
        loader.agree()
    if kind in ("val", "test"):
        check_aggregation(run.options.evaluating.aggregation, [each.name for each in loaders], run.stage)
    if kind == "train":
        use_training_loaders(run, loaders, sharding)
    else:
        run.data.loaders[kind] = loaders
    rules.loaded(run, kind)
    return loaders


def use_training_loaders(run: Run, loaders: list[Loader], sharding: RankSharding) -> None:
    """Let the loop read these training loaders: a single one, or a mixture that draws from several.

    Count what their sharding says of each batch.
    """
    run.data.loaders["train"] = loaders
    run.data.totals = make_totals(run, sharding)
    if run.options.prefetch_batches:
        fetch_ahead(run, loaders)
    if run.options.limit_train_batches == 0 or (len(loaders) == 1 and asked_mixture(run) is None):
        run.data.train = loaders[0]
        return
    from hookline.data.mixture import MixedLoader

    mixture = resolve_mixture(run)
    run.data.train, run.data.is_mixture = MixedLoader(loaders, mixture, run.data.count_tokens), True
    run.state.current.several_loaders = len(loaders) > 1
    s, metrics = run.state, run.state.log

    def picked(index: int, name: str) -> None:
        s.current.dataloader_idx, s.current.dataloader_name, metrics.loader = index, name, name

    run.data.train.picked = picked
    if run.resume.contents.get("loader"):
        with restoring(run.resume.path, "the position of the training data"):
            # before the epoch begins, so that hooks see and change the restored mixture
            run.data.train.load_state_dict(run.resume.contents["loader"])
    run.data.train.changed = lambda text: s.logger.add_text("mixture", text, s.step)
    if mixture.loss_weights:
        if not run.steps.automatic_optimization:
            raise OptionError(
                "Mixture: loss_weights are applied before backward, which manual optimization does itself."
            )
        run.data.loss_weights = dict(mixture.loss_weights)


def sharding_of(run: Run, kind: str) -> RankSharding:
    """Return this rank's share of the data; on one process all of it."""
    strategy = run.strategy
    return RankSharding(strategy.ranks, trains=kind == "train", is_sharded=strategy.shards_data)


def fetch_ahead(run: Run, loaders: list[Loader]) -> None:
    """Let threads fetch training batches; also move them, unless a listener needs them before that."""
    steps, plan, device = run.steps, run.plan, run.strategy.device
    is_overridden = any(
        overrides(each, "transfer_batch_to_device") for each in (steps, run.datamodule) if each is not None
    )
    for loader in loaders:
        if not loader.reader.may_run_ahead:
            log.warning(
                "prefetch_batches=%d has no effect on the loader %r: %s.",
                run.options.prefetch_batches,
                loader.name,
                "its workers fetch in advance already; set its prefetch_factor"
                if getattr(loader.source, "num_workers", 0)
                else "its batches are made in the main process; give it workers",
            )
            continue
        loader.ahead = run.options.prefetch_batches
        if run.traits.transfers and not is_overridden and not plan.listeners("on_before_batch_transfer"):
            loader.move = lambda batch: move(batch, device)


def asked_mixture(run: Run) -> Any:
    """Return the `mixture` of fit or of the data module, as given; None if there is neither."""
    return run.data.mixture if run.data.mixture is not None else getattr(run.datamodule, "mixture", None)


def resolve_mixture(run: Run) -> Mixture:
    """Return how training loaders are mixed: as given, or by default."""
    from hookline.data.mixing import Mixture, make_mixture

    given = asked_mixture(run)
    return Mixture() if given is None else make_mixture(given)


def estimated_steps(run: Run) -> float:
    """Return the number of optimizer updates of this run; infinite if it is not known."""
    load(run, "train")
    options = run.options
    assert options.max_epochs is not None
    steps = math.inf
    # the length of a whole epoch, which does not change in a resumed run
    length = run.data.train.first_length
    if options.max_epochs >= 0 and length is not None:
        steps = _updates_of(run, length, options.max_epochs)
    return min(steps, options.max_steps) if options.max_steps >= 0 else steps


def remaining_steps(run: Run) -> float:
    """Return the updates from the position of the run to its end; infinite if they are not known.

    They are not those of the whole run less those made, if a resume has changed the batch size or the
    accumulation.
    """
    s, options, loader, position = run.state, run.options, run.data.train, run.progress.position
    assert options.max_epochs is not None
    steps, length = math.inf, loader.first_length
    if options.max_epochs >= 0 and length is not None:
        next_epoch = s.epochs_seen + bool(position)
        steps = _updates_of(run, length, options.max_epochs) - _updates_of(run, length, next_epoch)
        if position:
            saved = run.resume.contents.get("loader")
            left = None if saved is None or run.data.is_mixture else loader.left_of(saved)
            left = length - position if left is None else min(left, length)
            steps += math.ceil((run.window.batches + left) / options.accumulate_grad_batches)
    return min(steps, options.max_steps - s.step) if options.max_steps >= 0 else steps


def _updates_of(run: Run, length: int, epochs: int) -> int:
    """Return the updates in so many epochs of `length` batches; a hook may have a schedule for them."""
    own, most = run.options.accumulate_grad_batches, run.options.max_steps
    for entry in run.state.hooks.entries():
        if entry.enabled and hasattr(entry.hook, "count_updates"):
            return int(entry.hook.count_updates(length, epochs, own, most if most >= 0 else math.inf))
    return math.ceil(length / own) * epochs


def writes_predictions(run: Run) -> bool:
    """Return whether a hook writes the predictions of the run."""
    return any(
        each.enabled and getattr(each.hook, "writes_predictions", False) for each in run.state.hooks.entries()
    )


def _check_loaders(run: Run, kind: str, loaders: list[Loader]) -> None:
    name = type(run.module).__name__
    if kind != "val" and not loaders:
        stage, what = ("fit", "a training loader") if kind == "train" else (kind, "a loader")
        raise OptionError(
            f"{stage} needs {what}: pass it to {stage}, or return it from {name}.{kind}_dataloader "
            "or a DataModule."
        )
    for loader in loaders:
        if (inner := worker_loader(loader.source)) is not None:
            refuse_unimportable(inner, loader.name)
        if (
            kind == "predict"
            and isinstance(getattr(loader.source, "sampler", None), RandomSampler)
            and not writes_predictions(run)  # such a hook also writes which samples they are of
        ):
            log.warning(
                "The loader %r shuffles, so the predictions are not in the order of the dataset: pass "
                "DataLoader(..., shuffle=False).",
                loader.name,
            )
    empty = [each for each in loaders if each.length == 0]
    if (
        kind == "train"
        and empty
        and run.traits.rules.refuses_empty_data
        and run.options.limit_train_batches != 0
    ):
        ranks, source = run.strategy.ranks, empty[0].source
        samples, hint = length_of(getattr(source, "dataset", None)), ""
        if not ranks.alone:
            hint = f" for {ranks.data_size} ranks: with drop_last every rank needs a full batch"
        elif samples and getattr(source, "drop_last", False):
            size = getattr(source, "batch_size", None)
            hint = f": {samples} samples, batch_size={size} and drop_last=True make no batch"
        raise OptionError(f"The training loader {empty[0].name!r} is empty{hint}.")
    step = STEP_OF[kind]
    if (
        loaders
        and kind != "predict"
        and not isinstance(run.steps, PlainSteps)
        and not overrides(run.steps, step)
    ):
        raise OptionError(
            f"There is a {kind} loader, but {name} has no {step}(self, batch, batch_idx)."
            f"{nearly_named(type(run.steps), Module, step)}"
        )
