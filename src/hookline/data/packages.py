"""What is known about webdataset, Hugging Face datasets, MosaicML streaming and torchdata.

Their loaders and datasets are recognised by the modules of their classes; the packages are not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from hookline.data.generators import KINDS, Found, Value

SAMPLE_COUNT = ("num_samples", "from_beginning")
"""What MosaicML's `StreamingDataset.state_dict` has to be given."""
LARGEST_SEED = 64
"""Bits. A numpy generator that was not seeded has 128 random ones instead."""


def is_of(value: Any, package: str) -> bool:
    """Return whether an object's class, or one that it derives from, belongs to a package."""
    return any(each.__module__.partition(".")[0] == package for each in type(value).__mro__)


def is_stateful_loader(source: Any) -> bool:
    """Return whether a loader is torchdata's StatefulDataLoader."""
    return is_of(source, "torchdata") and any(
        each.__name__ == "StatefulDataLoader" for each in type(source).__mro__
    )


def required_arguments(method: Any, given: int = 0) -> list[str]:
    """Return the arguments that a call with so many positional ones still lacks."""
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
    """Return whether a dataset's state is made from the number of samples that were read, as
    MosaicML's is.
    """
    method = getattr(dataset, "state_dict", None)
    return (
        callable(method)
        and tuple(required_arguments(method)) == SAMPLE_COUNT
        and hasattr(dataset, "load_state_dict")
    )


def knows_ranks(value: Any) -> bool:
    """Return whether a dataset gives each rank a part of its own."""
    if takes_sample_count(value):
        return True
    if is_of(value, "datasets") and getattr(value, "_distributed", None) is not None:
        return True
    return any(getattr(each, "__name__", "") == "split_by_node" for each in stages(value))


def stages(source: Any) -> Iterator[Any]:
    """Yield the stages of a webdataset pipeline, those of the loaders and datasets in it included."""
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


def pipeline_generators(source: Any) -> Found:
    """Return what decides the order of a webdataset pipeline besides the random streams: generators, seeds,
    counts of epochs.
    """
    found: Found = {}
    for number, stage in enumerate(stages(source)):
        own: dict[str, Any] = getattr(stage, "__dict__", {})
        for options in (each for each in (own, own.get("kw")) if isinstance(each, dict)):
            for name in ("rng", "seed", "epoch"):  # a seed that was not given was drawn
                value = options.get(name)
                if isinstance(value, KINDS):
                    found[f"pipeline{number}.{name}"] = value
                elif isinstance(value, int | float | str):
                    found[f"pipeline{number}.{name}"] = Value(options, name)
    return found


def package_limits(source: Any) -> Iterator[str]:
    """Yield what a resume cannot reproduce, each as the rest of a sentence about the loader."""
    follows = (
        "Each process draws another order, so after a resume some samples of the epoch come twice and "
        "others not at all."
    )
    for stage in stages(source):
        if (size := _unseeded_shuffle(stage)) is not None:
            yield (
                f"shuffles with webdataset's .shuffle({size}) without a seed. {follows} "
                "Pass .shuffle(..., rng=random.Random(0))."
            )
        elif getattr(stage, "deterministic", None) is False and hasattr(stage, "nshards"):
            yield (
                f"draws shards with webdataset's resampling, which is not seeded. {follows} "
                "Use wds.ResampledShards(urls, deterministic=True)."
            )
    for step in shuffles(source):
        entropy = getattr(getattr(step.generator.bit_generator, "seed_seq", None), "entropy", 0)
        if isinstance(entropy, int) and entropy.bit_length() > LARGEST_SEED:
            yield f"shuffles a Hugging Face stream without a seed. {follows} Pass .shuffle(seed=0)."
    if is_stateful_loader(source):
        yield from _torchdata_limits(source)


def buffer_limits(source: Any) -> Iterator[str]:
    """Yield what the state of a Hugging Face stream leaves out; it counts where the stream is resumed by its
    state.
    """
    for step in shuffles(source):
        if (size := step.buffer_size) > 1:
            yield (
                f"reads a Hugging Face stream with .shuffle(buffer_size={size}), whose state_dict leaves "
                f"out the shuffle buffer. After a resume up to {size} samples of the epoch may be lost, and "
                "some may come twice. A torch DataLoader with num_workers=1 or more reads the epoch again "
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
            "after the resumed one have another order. Leave generator= out: the order then follows from "
            "the trainer's seed."
        )
