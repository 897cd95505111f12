"""The state dictionary that hooks of `trainers` get: a view of the live state, with epochs counted from 1."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from hookline.errors import closest
from hookline.state import State

KEYS = (
    "model",
    "optimizer",
    "device",
    "current_epoch",
    "current_batch_idx",
    "latest_loss",
    "avg_loss",
    "model_params",
    "status",
)


def from_one(epoch: int) -> int:
    """`trainers` counts epochs from 1."""
    return epoch + 1


class StateDict(MutableMapping[str, Any]):
    """The nine documented keys, true whenever they are looked at; keys of your own; and, if asked for, any
    fact of Hookline.
    """

    __slots__ = ("live",)

    def __init__(self, live: State) -> None:
        self.live = live

    def __getitem__(self, key: str) -> Any:
        if key == "current_epoch":
            return self.live.epoch + 1
        try:
            return self.live[key]
        except KeyError:
            raise KeyError(f"the state has no {key!r}.{closest(key, self)} Keys: {', '.join(self)}") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.live[key] = value

    def __delitem__(self, key: str) -> None:
        del self.live[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*KEYS, *self.live.extras])

    def __len__(self) -> int:
        return len(KEYS) + len(self.live.extras)

    def copy(self) -> dict[str, Any]:
        """The values of this moment."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))
