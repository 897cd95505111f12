"""What a resume can promise for a loader: said when a run begins, and when one is taken up with another
loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from hookline.data.generators import find_generators
from hookline.data.packages import buffer_limits, package_limits, required_arguments
from hookline.data.sources import has_state

Facts = dict[str, int | None]


def facts_of(source: Any, length: int | None, units: int | None, world_size: int, apart: bool) -> Facts:
    """What of a loader decides which batch is where. `units`: the samples or batches that are dealt out to
    ranks in a pass.
    """
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


def as_saved_now(saved: dict[str, Any], now: Facts, of_samples: bool) -> dict[str, Any]:
    """A state of the time when a run was always one process, in the form of today; where it stood is known to
    its opener only.
    """
    if "of_samples" in saved:
        return saved
    facts = {**now, "world_size": 1, "apart": 0, **saved["facts"]}
    return {**saved, "of_samples": of_samples, "passed_over": None, "facts": facts}


def changes(saved: dict[str, Any], kind: str, now: Facts) -> Iterator[str]:
    """What is not as it was when the checkpoint was made, and what follows from it."""
    was: Facts = saved["facts"]
    then = "when the checkpoint was made"
    if saved["kind"] != kind:
        yield (
            f"was read by its {saved['kind']} {then}, and is now by its {kind}: of its position only the "
            "number of batches is known."
        )
    same_world, same_size = was["world_size"] == now["world_size"], was["batch_size"] == now["batch_size"]
    if not same_world and any(each["apart"] and each["world_size"] != 1 for each in (was, now)):
        yield (
            f"was read by {was['world_size']} ranks {then}, and is by {now['world_size']} now, each from a "
            "source of its own: what the others have read of theirs cannot be taken up."
        )
    if not same_size:
        follows = (
            "The epoch goes on with the next sample."
            if saved["of_samples"]
            else "The position counts batches, so some samples come twice in this epoch, or not at all."
        )
        yield (
            f"had batches of {was['batch_size']} {then}, and has batches of {now['batch_size']} now. "
            f"{follows}"
        )
    if was["units"] != now["units"] or (was["length"] != now["length"] and same_world and same_size):
        yield f"had {was['length']} batches {then}, and has {now['length']} now: their order is another one."
    if was["workers"] != now["workers"] and (kind == "stream" or not was["workers"] or not now["workers"]):
        follows = (
            "which batch comes when depends on their number"
            if kind == "stream"
            else "random numbers that the dataset draws are others, with workers or without; the order stays"
        )
        yield f"had {was['workers']} workers {then}, and has {now['workers']} now: {follows}."


def resume_limits(loader: Any) -> list[str]:
    """What of this loader (a `Loader`) could not be resumed exactly, each as a sentence; empty if nothing is
    known.
    """
    source = loader.source
    limits = [*package_limits(source), *_limits_of_state(loader)]
    if isinstance(source, Iterator) and not has_state(source):
        limits.append(
            f"is a {type(source).__name__}, which can be iterated over only once: a resumed run must be "
            "given a new one, from the epoch's start on. A list, a DataLoader or an object with __iter__ "
            "begins again."
        )
    elif isinstance(source, DataLoader) and source.num_workers and loader.reader.kind != "state":
        limits += _limits_of_workers(source)
    return [f"The {loader.name} loader {limit}" for limit in limits]


def _limits_of_state(loader: Any) -> Iterator[str]:
    """What a state leaves out, or why it is not used."""
    if loader.reader.kind == "state":
        yield from buffer_limits(loader.source)
        return
    for each in (loader.source, getattr(loader.source, "dataset", None)):
        save, load = getattr(each, "state_dict", None), getattr(each, "load_state_dict", None)
        needed = (
            [*required_arguments(save), *required_arguments(load, 1)]
            if callable(save) and callable(load)
            else []
        )
        if needed:
            yield (
                f"has a state of its own that is not used, because {type(each).__name__}.state_dict or "
                f"load_state_dict needs further arguments ({', '.join(needed)}). It is resumed by reading "
                "the epoch again."
            )


def _limits_of_workers(source: DataLoader[Any]) -> Iterator[str]:
    dataset = source.dataset
    if not source.in_order:
        yield "has in_order=False: batches come in whatever order the workers finish them."
    if isinstance(dataset, IterableDataset | MapDataPipe):
        yield (
            f"reads {type(dataset).__name__} with {source.num_workers} workers: it is resumed by reading "
            "the epoch again, and only with the same number of them."
        )
        if source.persistent_workers:
            yield (
                "has persistent_workers: random numbers drawn in them go on from epoch to epoch, and "
                "begin anew after a resume."
            )
        return
    for where in find_generators(dataset=dataset):
        yield (
            f"has a random generator of its own in {where}, which each of the {source.num_workers} workers "
            "moves by itself: what it draws is not repeated. Draw from random, numpy.random or torch: "
            "these are seeded."
        )
