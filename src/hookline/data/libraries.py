"""What is known about torchdata, Hugging Face datasets, MosaicML streaming, LitData and webdataset.

They are recognised by the names of their classes, without an import: how each divides its data over ranks,
and what its state leaves out.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from hookline.data.seeding import GENERATOR_KINDS, Generators, Value

SAMPLE_COUNT = ("num_samples", "from_beginning")
"""The arguments of MosaicML's `StreamingDataset.state_dict`."""
PACKAGES = ("datasets", "litdata", "streaming", "torchdata", "webdataset")
MAX_SEED_BITS = 64
"""An unseeded NumPy generator has 128 random bits."""


def required_arguments(method: Any, given: int = 0) -> list[str]:
    """Return the required arguments that a call with `given` positional arguments lacks."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # written in C
        return []
    positional = [
        each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    named = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    return [each.name for each in (*positional[given:], *named) if each.default is each.empty]


def is_of(value: Any, package: str) -> bool:
    """Return whether an object's class, or one that it derives from, belongs to a package."""
    return any(each.__module__.partition(".")[0] == package for each in type(value).__mro__)


def is_stateful_loader(source: Any) -> bool:
    """Return whether a loader is torchdata's StatefulDataLoader."""
    return is_of(source, "torchdata") and any(
        each.__name__ == "StatefulDataLoader" for each in type(source).__mro__
    )


def takes_sample_count(dataset: Any) -> bool:
    """Return whether a dataset's state_dict takes the number of samples read, as MosaicML's does."""
    method = getattr(dataset, "state_dict", None)
    return (
        callable(method)
        and tuple(required_arguments(method)) == SAMPLE_COUNT
        and hasattr(dataset, "load_state_dict")
    )


def is_litdata(source: Any) -> bool:
    """Return whether a loader is LitData's StreamingDataLoader."""
    return is_of(source, "litdata") and isinstance(source, DataLoader)


def knows_ranks(value: Any) -> bool:
    """Return whether a dataset shards itself over the ranks."""
    if any(True for _ in rank_claims(value)) or takes_sample_count(value):
        return True
    return any(getattr(each, "__name__", "") == "split_by_node" for each in stages(value))


class RankClaim(NamedTuple):
    """The rank that a dataset reads its part for."""

    dataset: str
    rank: int
    world_size: int
    advice: str


def rank_claims(value: Any) -> Iterator[RankClaim]:
    """Yield the rank for which a dataset, or each dataset in it, reads its part; nothing if it reads all."""
    if is_of(value, "litdata"):
        for each in (value, *getattr(value, "_datasets", ())):
            if (found := getattr(each, "distributed_env", None)) is not None:
                yield RankClaim(
                    "LitData's StreamingDataset",
                    found.global_rank,
                    found.world_size,
                    "LitData looks for the rank when a StreamingDataset is created. Create it in "
                    "train_dataloader of the module or of a DataModule, which is called when the ranks are "
                    "connected.",
                )
    elif is_of(value, "datasets") and (split := getattr(value, "_distributed", None)) is not None:
        yield RankClaim(
            "a Hugging Face stream",
            split.rank,
            split.world_size,
            "Pass int(os.environ['RANK']) and int(os.environ['WORLD_SIZE']) to split_dataset_by_node.",
        )
    elif takes_sample_count(value) and (world := getattr(value, "_unique_rank_world", None)) is not None:
        yield RankClaim(
            "MosaicML's StreamingDataset",
            world.rank,
            world.num_ranks,
            "It reads RANK, WORLD_SIZE and LOCAL_WORLD_SIZE from the environment when it is created: start "
            "the ranks with torchrun.",
        )


def rank_conflict(source: Any, rank: int, world_size: int) -> str:
    """Return why a source would not give this rank its own part of the data, with what to change; or ""."""
    for owner in (source, getattr(source, "dataset", None)):
        for claim in rank_claims(owner):
            if (claim.rank, claim.world_size) != (rank, world_size):
                return (
                    f"{claim.dataset} reads the part of rank {claim.rank} of {claim.world_size} on rank "
                    f"{rank} of {world_size}, so that ranks would train on the same samples. {claim.advice}"
                )
    if any(getattr(each, "__name__", "") == "single_node_only" for each in stages(source)):
        return (
            "a webdataset has the default nodesplitter, which refuses several ranks. Pass "
            "WebDataset(..., nodesplitter=wds.split_by_node), so that each rank reads its own shards."
        )
    return ""


def stages(source: Any) -> Iterator[Any]:
    """Yield the stages of a webdataset pipeline, and those of the loaders and datasets in it."""
    if not is_of(source, "webdataset"):
        inner = getattr(source, "dataset", None)
        if inner is not None and is_of(inner, "webdataset"):
            yield from stages(inner)
        return
    for stage in getattr(source, "pipeline", ()):
        yield stage
        yield from stages(stage)


def worker_loader(source: Any) -> DataLoader[Any] | None:
    """Return the DataLoader that may have workers: the source itself, or the one in a webdataset pipeline."""
    if isinstance(source, DataLoader):
        return source
    return next((each for each in stages(source) if isinstance(each, DataLoader)), None)


def random_steps(dataset: Any) -> Iterator[Any]:
    """Yield the steps of a Hugging Face stream that shuffle it, or interleave streams at random."""
    if is_of(dataset, "datasets"):
        yield from _random_steps(getattr(dataset, "_ex_iterable", None))


def omits_buffer(source: Any) -> bool:
    """Return whether the state of a Hugging Face stream omits samples that wait in a shuffle buffer."""
    steps = itertools.chain(random_steps(source), random_steps(getattr(source, "dataset", None)))
    return any(getattr(step, "buffer_size", 1) > 1 for step in steps)


def _random_steps(step: Any) -> Iterator[Any]:
    if step is None:
        return
    if isinstance(getattr(step, "generator", None), np.random.Generator):
        yield step
    for inner in (getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())):
        yield from _random_steps(inner)


def parts_of(source: Any) -> list[Any]:
    """Return a source, its dataset, and the datasets that a dataset of the user's own class reads."""
    found = [source, getattr(source, "dataset", None)]
    for owner in found[:2]:
        if isinstance(owner, IterableDataset) and not any(is_of(owner, package) for package in PACKAGES):
            found += getattr(owner, "__dict__", {}).values()
    return [*{id(each): each for each in found}.values()]


def pipeline_generators(source: Any) -> Generators:
    """Return the generators, seeds and epoch counts that determine the order of a webdataset pipeline."""
    found: Generators = {}
    for number, stage in enumerate(stages(source)):
        own: dict[str, Any] = getattr(stage, "__dict__", {})
        for options in (each for each in (own, own.get("kw")) if isinstance(each, dict)):
            for name in ("rng", "seed", "epoch"):  # without a given seed, webdataset has drawn one
                value = options.get(name)
                if isinstance(value, GENERATOR_KINDS):
                    found[f"pipeline{number}.{name}"] = value
                elif isinstance(value, int | float | str):
                    found[f"pipeline{number}.{name}"] = Value(options, name)
    return found


def package_limits(source: Any) -> Iterator[str]:
    """Yield what a resume cannot reproduce, each as the rest of a sentence about the loader."""
    effect = (
        "Each process draws a different order, so after a resume some samples of the epoch are repeated and "
        "others are skipped."
    )
    parts = parts_of(source)
    for stage in {id(each): each for part in parts for each in stages(part)}.values():
        if (size := _unseeded_shuffle(stage)) is not None:
            yield (
                f"shuffles with webdataset's .shuffle({size}) without a seed. {effect} "
                "Pass .shuffle(..., rng=random.Random(0))."
            )
        elif getattr(stage, "deterministic", None) is False and hasattr(stage, "nshards"):
            yield (
                f"draws shards with webdataset's resampling, which is not seeded. {effect} "
                "Use wds.ResampledShards(urls, deterministic=True)."
            )
    for step in itertools.chain(*map(random_steps, parts)):
        entropy = getattr(getattr(step.generator.bit_generator, "seed_seq", None), "entropy", 0)
        if isinstance(entropy, int) and entropy.bit_length() > MAX_SEED_BITS:
            yield (
                f"shuffles a Hugging Face stream without a seed. {effect} Pass .shuffle(seed=0)."
                if hasattr(step, "buffer_size")
                else "interleaves Hugging Face streams without a seed. Each process draws a different order, "
                "so after a resume samples may be repeated or skipped. Pass interleave_datasets(..., seed=0)."
            )
    if isinstance(source, DataLoader) and takes_sample_count(source.dataset):
        yield from _mosaicml_limits(source)


def _unseeded_shuffle(stage: Any) -> int | None:
    """Return the size of a shuffle that has neither a seed nor a generator."""
    function: Any = getattr(stage, "f", None)
    if getattr(function, "__name__", "") not in ("_shuffle", "shuffle"):
        return None
    try:
        given = inspect.signature(function).bind(None, *stage.args, **stage.kw)
    except (TypeError, ValueError, AttributeError):
        return None
    given.apply_defaults()
    size = given.arguments.get("bufsize", 0)
    is_seeded = any(given.arguments.get(name) is not None for name in ("rng", "seed"))
    return None if is_seeded or size in (0, 1) else int(size)


def state_limits(source: Any) -> Iterator[str]:
    """Yield what a resume by the source's own state cannot reproduce, as the rest of a sentence."""
    if is_stateful_loader(source) and (workers := source.num_workers):
        yield (
            f"is torchdata's {type(source).__name__} with {workers} workers. It restores the order of "
            "samples, but not the random numbers that a dataset draws in its workers. Use torch's "
            "DataLoader: its workers are seeded for each batch."
        )


def refused_state(source: Any, was: int | None, now: int | None) -> str:
    """Return why a source cannot load the state of a loader with another number of workers; or ""."""
    if not is_stateful_loader(source) or was == now:
        return ""
    return (
        f"is torchdata's {type(source).__name__}, which had {was} workers when the checkpoint was saved, and "
        f"has {now} now. Its state can be loaded with the same number only: pass num_workers={was}."
    )


def _mosaicml_limits(source: DataLoader[Any]) -> Iterator[str]:
    size: Any = getattr(source.dataset, "batch_size", source.batch_size)
    if size != source.batch_size:
        yield (
            f"reads batches of {source.batch_size} from MosaicML's StreamingDataset(batch_size={size}), "
            "which divides its samples over workers and ranks by its own batch size. After a resume some "
            "samples of the epoch may be repeated and others skipped. "
            f"Pass StreamingDataset(batch_size={source.batch_size})."
        )
