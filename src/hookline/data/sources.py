"""Facts about a user's source of batches that are known without reading it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
    default_convert,
)

from hookline.data.libraries import (
    knows_ranks,
    package_limits,
    required_arguments,
    state_limits,
    worker_loader,
)
from hookline.data.seeding import find_generators, seeds_itself


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
    return any(
        getattr(each, "shards_itself", False) is True
        or knows_ranks(each)
        or isinstance(getattr(each, "num_replicas", None), int)
        or isinstance(getattr(each, "num_processes", None), int)
        for each in parts
    )


# ---- how exact a resume is ---------------------------------------------------------------------------------


SourceFacts = dict[str, int | None]


def batch_size_of(source: Any) -> int | None:
    """Return the batch size of a loader or of its batch sampler; None if unknown."""
    size = getattr(source, "batch_size", None)
    if size is None:
        size = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def source_facts(
    source: Any, length: int | None, units: int | None, world_size: int, apart: bool
) -> SourceFacts:
    """Return the facts that determine the position of each batch. units: samples or batches in a pass."""
    inner = worker_loader(source)
    workers = getattr(source if inner is None else inner, "num_workers", None)
    return {
        "length": length,
        "batch_size": batch_size_of(source),
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
    is_exact = saved["of_samples"] or kind == "state"
    if not same_size and (same_world or not is_exact):
        effect = (
            "The epoch continues with the next sample."
            if saved["of_samples"]
            else "The epoch continues where its state says."
            if kind == "state"
            else "The position counts batches, so some samples of this epoch are repeated or skipped."
        )
        yield (
            f"had batches of {was['batch_size']} {then}, and has batches of {now['batch_size']} now. {effect}"
        )
    if not same_world:
        yield from _global_batch_change(was, now)
    same_units = was["units"] == now["units"] or saved["kind"] != kind or (kind == "state" and not same_size)
    if not same_units or (was["length"] != now["length"] and same_world and same_size):
        yield f"had {was['length']} batches {then}, and has {now['length']} now: their order is different."
    if was["workers"] != now["workers"] and (kind != "indices" or not was["workers"] or not now["workers"]):
        effect = (
            "the order of batches may depend on their number"
            if kind != "indices"
            else "the random numbers that the dataset draws are different, but the order is the same"
        )
        yield f"had {was['workers']} workers {then}, and has {now['workers']} now: {effect}."


def _global_batch_change(was: SourceFacts, now: SourceFacts) -> Iterator[str]:
    """Yield that the batch size times the number of data-parallel ranks has changed."""
    if was["batch_size"] is None or now["batch_size"] is None:
        return
    ranks = now["world_size"] or 1
    before, after = was["batch_size"] * (was["world_size"] or 1), now["batch_size"] * ranks
    if before != after:
        keep = f" To keep it, set batch_size={before // ranks}." if before % ranks == 0 else ""
        yield (
            f"has another global batch than when the checkpoint was saved: {before} -> {after} (batch size x "
            f"ranks: {was['batch_size']} x {was['world_size']} -> {now['batch_size']} x {ranks}).{keep}"
        )


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
    elif (inner := worker_loader(source)) is not None and inner.num_workers and loader.reader.kind != "state":
        limits += _limits_of_workers(inner)
    return [f"The {loader.name} loader {limit}" for limit in limits]


def _limits_of_state(loader: Any) -> Iterator[str]:
    """Yield what a state omits, or why it is not used."""
    if loader.reader.kind == "state":
        yield from state_limits(loader.source)
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
                "after a resume. Leave out persistent_workers, or use no random numbers in the dataset."
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
