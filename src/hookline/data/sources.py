"""Facts about a user's source of batches that are known without reading it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
    default_convert,
)

from hookline.data.seeding import GENERATOR_KINDS, Generators, Value, find_generators, seeds_itself

# ---- webdataset, Hugging Face datasets, MosaicML streaming and torchdata -----------------------------------


SAMPLE_COUNT = ("num_samples", "from_beginning")
"""The arguments of MosaicML's `StreamingDataset.state_dict`."""
MAX_SEED_BITS = 64
"""An unseeded NumPy generator has 128 random bits."""


def is_of(value: Any, package: str) -> bool:
    """Return whether an object's class, or one that it derives from, belongs to a package."""
    return any(each.__module__.partition(".")[0] == package for each in type(value).__mro__)


def is_stateful_loader(source: Any) -> bool:
    """Return whether a loader is torchdata's StatefulDataLoader."""
    return is_of(source, "torchdata") and any(
        each.__name__ == "StatefulDataLoader" for each in type(source).__mro__
    )


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


def takes_sample_count(dataset: Any) -> bool:
    """Return whether a dataset's state_dict takes the number of samples read, as MosaicML's does."""
    method = getattr(dataset, "state_dict", None)
    return (
        callable(method)
        and tuple(required_arguments(method)) == SAMPLE_COUNT
        and hasattr(dataset, "load_state_dict")
    )


def knows_ranks(value: Any) -> bool:
    """Return whether a dataset shards itself over the ranks."""
    if takes_sample_count(value):
        return True
    if is_of(value, "datasets") and getattr(value, "_distributed", None) is not None:
        return True
    return any(getattr(each, "__name__", "") == "split_by_node" for each in stages(value))


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


def shuffles(source: Any) -> Iterator[Any]:
    """Yield the steps of a Hugging Face stream that shuffle."""
    for dataset in (source, getattr(source, "dataset", None)):
        if is_of(dataset, "datasets"):
            yield from _shuffling_steps(getattr(dataset, "_ex_iterable", None))


def _shuffling_steps(step: Any) -> Iterator[Any]:
    if step is None:
        return
    if isinstance(getattr(step, "buffer_size", None), int) and isinstance(
        getattr(step, "generator", None), np.random.Generator
    ):
        yield step
    for inner in (getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())):
        yield from _shuffling_steps(inner)


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
    for stage in stages(source):
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
    for step in shuffles(source):
        entropy = getattr(getattr(step.generator.bit_generator, "seed_seq", None), "entropy", 0)
        if isinstance(entropy, int) and entropy.bit_length() > MAX_SEED_BITS:
            yield f"shuffles a Hugging Face stream without a seed. {effect} Pass .shuffle(seed=0)."
    if is_stateful_loader(source):
        yield from _torchdata_limits(source)


def buffer_limits(source: Any) -> Iterator[str]:
    """Yield what the state of a Hugging Face stream omits, for a stream that is resumed by its state."""
    for step in shuffles(source):
        if (size := step.buffer_size) > 1:
            yield (
                f"reads a Hugging Face stream with .shuffle(buffer_size={size}), whose state_dict omits "
                f"the shuffle buffer. After a resume, up to {size} samples of the epoch may be skipped, and "
                "some may be repeated. A torch DataLoader with num_workers=1 or more reads the epoch again "
                "instead, which is exact if the shuffle is seeded."
            )


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


def _torchdata_limits(source: Any) -> Iterator[str]:
    name, workers = f"is torchdata's {type(source).__name__}", getattr(source, "num_workers", 0)
    if workers:
        yield (
            f"{name} with {workers} workers. It restores the order of samples, but not the random numbers "
            "that a dataset draws in its workers."
        )
    elif getattr(source, "generator", None) is not None:
        yield (
            f"{name} with a generator and without workers. It does not restore the generator, so the epochs "
            "after the resumed one have a different order. Leave out generator=: the trainer's seed then "
            "determines the order."
        )


def has_state(value: Any) -> bool:
    """Return whether it has a usable `state_dict` and `load_state_dict`."""
    # Accelerate's loaders have the methods even if they do not work
    if getattr(value, "use_stateful_dataloader", None) is False:
        return False
    save, load = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return (
        callable(save) and callable(load) and not required_arguments(save) and not required_arguments(load, 1)
    )


def length_of(source: Any) -> int | None:
    """Return `len(source)`, or None if it has no length."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def is_indexed(source: Any) -> bool:
    """Return whether it reads a dataset by the indices of a sampler."""
    if not isinstance(source, DataLoader) or has_state(source) or hasattr(source, "base_dataloader"):
        return False  # Accelerate's loader reads another loader, which has its own order
    dataset: Any = source.dataset
    # torch traverses the attributes of data pipes, so that they cannot be wrapped
    return not isinstance(dataset, MapDataPipe | IterDataPipe | IterableDataset)


def is_of_samples(source: Any) -> bool:
    """Return whether torch's BatchSampler builds its batches, so that they can be built of other samples."""
    return is_indexed(source) and type(source.batch_sampler) is BatchSampler


def keeps_its_ways(source: Any) -> bool:
    """Return whether a loader has `__iter__` and `__len__` of torch's DataLoader."""
    return type(source).__iter__ is DataLoader.__iter__ and type(source).__len__ is DataLoader.__len__


def counts_samples(source: Any) -> bool:
    """Return whether a batch has as many samples as indices; a user's collate_fn may change that."""
    return is_of_samples(source) and source.collate_fn in (default_collate, default_convert)


def shards_itself(source: Any) -> bool:
    """Return whether a source shards itself over the ranks, by its attributes or those of its parts.

    DistributedSampler and similar samplers have `num_replicas`, Accelerate's objects `num_processes`.
    Datasets of other packages are recognised by their classes.
    """
    parts = [source, *(getattr(source, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    parts.append(getattr(parts[-1], "sampler", None))
    if any(getattr(each, "shards_itself", False) is True or knows_ranks(each) for each in parts):
        return True
    return any(
        isinstance(getattr(each, name, None), int)
        for each in parts
        for name in ("num_replicas", "num_processes")
    )


# ---- how exact a resume is ---------------------------------------------------------------------------------


SourceFacts = dict[str, int | None]


def source_facts(
    source: Any, length: int | None, units: int | None, world_size: int, apart: bool
) -> SourceFacts:
    """Return the facts that determine the position of each batch. units: samples or batches in a pass."""
    size = getattr(source, "batch_size", None)
    if size is None:
        size = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    workers = getattr(source, "num_workers", None)
    return {
        "length": length,
        "batch_size": size if isinstance(size, int) else None,
        "workers": workers if isinstance(workers, int) else None,
        "units": units,
        "world_size": world_size,
        "apart": int(apart),
    }


def as_saved_now(saved: dict[str, Any], now: SourceFacts, of_samples: bool) -> dict[str, Any]:
    """Return a state of an old version, which supported one process only, in the current format."""
    if "of_samples" in saved:
        return saved
    facts = {**now, "world_size": 1, "apart": 0, **saved["facts"]}
    return {**saved, "of_samples": of_samples, "passed_over": None, "facts": facts}


def changes(saved: dict[str, Any], kind: str, now: SourceFacts) -> Iterator[str]:
    """Yield what has changed since the checkpoint was saved, and the effect, as the rest of a sentence."""
    was: SourceFacts = saved["facts"]
    then = "when the checkpoint was saved"
    if saved["kind"] != kind:
        yield (
            f"was read by its {saved['kind']} {then}, and is now read by its {kind}: only the number of "
            "batches is known of its position."
        )
    same_world, same_size = was["world_size"] == now["world_size"], was["batch_size"] == now["batch_size"]
    if not same_world and any(each["apart"] and each["world_size"] != 1 for each in (was, now)):
        yield (
            f"was read by {was['world_size']} ranks {then}, and is now read by {now['world_size']}, each "
            "from its own source: the positions of the other ranks cannot be restored."
        )
    if not same_size:
        effect = (
            "The epoch continues with the next sample."
            if saved["of_samples"]
            else "The position counts batches, so some samples of this epoch are repeated or skipped."
        )
        yield (
            f"had batches of {was['batch_size']} {then}, and has batches of {now['batch_size']} now. {effect}"
        )
    if was["units"] != now["units"] or (was["length"] != now["length"] and same_world and same_size):
        yield f"had {was['length']} batches {then}, and has {now['length']} now: their order is different."
    if was["workers"] != now["workers"] and (kind == "stream" or not was["workers"] or not now["workers"]):
        effect = (
            "the order of batches depends on their number"
            if kind == "stream"
            else "the random numbers that the dataset draws are different, but the order is the same"
        )
        yield f"had {was['workers']} workers {then}, and has {now['workers']} now: {effect}."


def resume_limits(loader: Any) -> list[str]:
    """Return what a resume of this `Loader` cannot reproduce exactly, each as a sentence."""
    source = loader.source
    limits = [*package_limits(source), *_limits_of_state(loader)]
    if isinstance(source, Iterator) and not has_state(source):
        limits.append(
            f"is a {type(source).__name__}, which can be iterated over only once: pass a new one, from the "
            "start of the epoch, to a resumed run. A list, a DataLoader or an object with __iter__ can be "
            "iterated over again."
        )
    elif isinstance(source, DataLoader) and source.num_workers and loader.reader.kind != "state":
        limits += _limits_of_workers(source)
    return [f"The {loader.name} loader {limit}" for limit in limits]


def _limits_of_state(loader: Any) -> Iterator[str]:
    """Yield what a state omits, or why it is not used."""
    if loader.reader.kind == "state":
        yield from buffer_limits(loader.source)
        return
    for owner in (loader.source, getattr(loader.source, "dataset", None)):
        save, load = getattr(owner, "state_dict", None), getattr(owner, "load_state_dict", None)
        needed = (
            [*required_arguments(save), *required_arguments(load, 1)]
            if callable(save) and callable(load)
            else []
        )
        if needed:
            yield (
                f"has a state that is not used, because {type(owner).__name__}.state_dict or "
                f"load_state_dict needs further arguments ({', '.join(needed)}). It is resumed by reading "
                "the epoch again."
            )


def _limits_of_workers(source: DataLoader[Any]) -> Iterator[str]:
    dataset = source.dataset
    if not source.in_order:
        yield "has in_order=False: batches come in the order in which the workers finish them."
    if isinstance(dataset, IterableDataset | MapDataPipe):
        yield (
            f"reads {type(dataset).__name__} with {source.num_workers} workers: it is resumed by reading "
            "the epoch again, and only with the same number of workers."
        )
        if source.persistent_workers:
            yield (
                "has persistent_workers: their random streams continue from epoch to epoch, but restart "
                "after a resume."
            )
        return
    if seeds_itself(source.collate_fn):
        yield (
            f"has {type(source.collate_fn).__name__}(seed=...), whose generator each of the "
            f"{source.num_workers} workers advances separately: a resume does not reproduce its numbers. "
            "Leave out seed: then it draws from torch or numpy.random, which are seeded."
        )
    for where in find_generators(dataset=dataset):
        yield (
            f"has a random generator in {where}, which each of the {source.num_workers} workers advances "
            "separately: a resume does not reproduce its numbers. Draw from random, numpy.random or torch: "
            "these are seeded."
        )
