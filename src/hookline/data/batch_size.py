"""Another batch size for a user's loader: which loaders can have one, and the loader with it."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset

from hookline.data.sources import keeps_its_ways
from hookline.util.errors import OptionError


def why_fixed(source: Any) -> str:
    """Return why a loader cannot have another batch size, as the rest of a sentence; empty if it can."""
    if not isinstance(source, DataLoader):
        kind = "a dataset" if isinstance(source, Dataset) else f"a {type(source).__name__}"
        return f"is {kind}, which makes its own batches"
    if source.batch_sampler is None:
        return "has batch_size=None, so its dataset makes the batches"
    if type(source.batch_sampler) is not BatchSampler:
        return f"has the batch sampler {type(source.batch_sampler).__name__}, which chooses the batches"
    if not keeps_its_ways(source):
        return f"is a {type(source).__name__} with an __iter__ or __len__ of its own"
    if hasattr(source.dataset, "batch_size"):
        return f"reads {type(source.dataset).__name__}, which has a batch size of its own"
    return ""


def with_batch_size(source: Any, size: int) -> Any:
    """Return a loader like this one with another batch size; it shares the dataset and the sampler."""
    if why := why_fixed(source):
        raise OptionError(f"The training loader {why}, so its batch size cannot be changed.")
    made = copy.copy(source)
    attributes = made.__dict__  # a DataLoader refuses assignment
    old = source.batch_sampler
    attributes["batch_sampler"] = BatchSampler(old.sampler, size, old.drop_last)
    # `batch_size` is an attribute of this name; the iterator is one of the loader that was copied
    attributes["batch_size"], attributes["_iterator"] = size, None
    return made
