"""What ranks must have in common before they share a source of batches."""

from __future__ import annotations

import hashlib
from typing import Any

from hookline.data.generators import Found, states_of
from hookline.errors import OptionError
from hookline.ranks import Ranks


def agree_on(
    ranks: Ranks, name: str, source: Any, generators: Found, length: int | None, apart: bool
) -> list[int | None]:
    """The lengths of all ranks; an error if they share a source and do not have the same. Waits for all."""
    told = ranks.gather([length, type(source).__name__, apart, _digest(generators)])
    mine = told[ranks.rank]
    lengths = [each[0] for each in told]
    if any(each[2] != mine[2] for each in told):
        raise OptionError(
            f"The loader {name!r} shards itself on some ranks only: {_by_rank([each[2] for each in told])}."
        )
    if apart:
        return lengths
    shared = f"The loader {name!r} is shared by all ranks"
    hint = "A loader whose ranks have data of their own says so: loader.shards_itself = True."
    if len(set(lengths)) > 1:
        raise OptionError(
            f"{shared}, but each would get another number of batches from it: {_by_rank(lengths)}. {hint}"
        )
    if len({each[3] for each in told}) > 1:
        raise OptionError(
            f"{shared}, but its random generators ({', '.join(generators)}) stand differently on them, so "
            f"they would not agree on the order. Seed them alike on every rank. {hint}"
        )
    return lengths


def _digest(generators: Found) -> str:
    if not generators:
        return ""
    return hashlib.blake2b(
        repr([_plain(each) for each in states_of(generators).values()]).encode(), digest_size=8
    ).hexdigest()


def _plain(state: Any) -> Any:
    """Something whose text shows all of it; that of a tensor or an array is cut short."""
    if hasattr(state, "tolist"):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(each) for key, each in state.items()}
    return [_plain(each) for each in state] if isinstance(state, list | tuple) else state


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
