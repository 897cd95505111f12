"""What kind of source of batches the user has brought: facts that can be seen without reading it."""

from __future__ import annotations

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

from hookline.data.packages import knows_ranks, required_arguments


def has_state(value: Any) -> bool:
    """Whether it can say where it is and be put there again."""
    if (
        getattr(value, "use_stateful_dataloader", None) is False
    ):  # Accelerate's loaders have the methods, also if they fail
        return False
    save, load = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return (
        callable(save) and callable(load) and not required_arguments(save) and not required_arguments(load, 1)
    )


def length_of(source: Any) -> int | None:
    """`len`, or None where there is none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def is_indexed(source: Any) -> bool:
    """Whether it reads a dataset by indices, in an order that its sampler makes."""
    if not isinstance(source, DataLoader) or has_state(source) or hasattr(source, "base_dataloader"):
        return False  # one that Accelerate has prepared reads another loader, whose order is not ours to make
    dataset: Any = (
        source.dataset
    )  # torch walks through the attributes of pipes: nothing may be put around them
    return not isinstance(dataset, MapDataPipe | IterDataPipe | IterableDataset)


def is_of_samples(source: Any) -> bool:
    """Whether its batches are made of single samples in a plain way, so that they can be made
    anew of others.
    """
    return is_indexed(source) and type(source.batch_sampler) is BatchSampler


def keeps_its_ways(source: Any) -> bool:
    """Whether a loader iterates and counts as torch's own does."""
    return type(source).__iter__ is DataLoader.__iter__ and type(source).__len__ is DataLoader.__len__


def counts_samples(source: Any) -> bool:
    """Whether a batch has as many samples as it was made of: not if the user's own function
    puts it together.
    """
    return is_of_samples(source) and source.collate_fn in (default_collate, default_convert)


def shards_itself(source: Any) -> bool:
    """Whether it knows of ranks by itself: it says so, or one of its parts does by how many there are.

    Torch's DistributedSampler and samplers like it have `num_replicas`; what Accelerate has prepared,
    `num_processes`. Datasets of other packages that split themselves by rank are known by their classes.
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
