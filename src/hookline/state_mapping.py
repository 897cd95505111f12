"""The state of a run as a dictionary: `state["latest_loss"]`, every fact by its name, and keys of the user's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from hookline.errors import closest


class StateMapping(MutableMapping[str, Any]):
    """Lets a state be read like a dictionary; facts cannot be replaced, keys of your own may be added."""

    __slots__ = ()
    extras: dict[str, Any]
    """Keys of the user's own."""

    def __getitem__(self, key: str) -> Any:
        if key in self.extras:
            return self.extras[key]
        if key in KEYS:
            return KEYS[key](self)
        if key in PLAIN_FACTS:
            return getattr(self, key)
        raise KeyError(f"the state has no {key!r}.{closest(key, self)} Keys: {', '.join(self)}")

    def __setitem__(self, key: str, value: Any) -> None:
        if key in KEYS or key in PLAIN_FACTS:
            raise TypeError(
                f"state[{key!r}] is a fact of the run and cannot be replaced; use another key for your own."
            )
        self.extras[key] = value

    def __delitem__(self, key: str) -> None:
        del self.extras[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*KEYS, *PLAIN_FACTS, *self.extras])

    def __len__(self) -> int:
        return len(KEYS) + len(PLAIN_FACTS) + len(self.extras)


def _average_loss(s: Any) -> float | None:
    mean = s.log.train_loss.compute()
    return None if mean is None else float(mean)


KEYS: dict[str, Callable[[Any], Any]] = {
    "model": lambda s: s.module,
    "experiment": lambda s: s.logger,
    "optimizer": lambda s: s.optimizers[0] if s.optimizers else None,
    "current_epoch": lambda s: s.epoch,
    "current_batch_idx": lambda s: s.batch_idx,
    "latest_loss": lambda s: s.loss,
    "avg_loss": _average_loss,
    "model_params": lambda s: sum(p.numel() for p in s.module.parameters()) if s.module is not None else 0,
}
"""Keys that are read otherwise than the fact of the same name, or that no fact is called by."""
PLAIN_FACTS = (
    "module",
    "wrapped_model",
    "batch_idx",
    "device",
    "status",
    "trainer",
    "config",
    "stage",
    "epoch",
    "step",
    "batches_seen",
    "samples_seen",
    "tokens_seen",
    "optimizers",
    "schedulers",
    "rank",
    "local_rank",
    "world_size",
    "lr",
    "resumed",
    "sanity_checking",
    "hooks",
    "fetch_seconds",
    "timings",
    "logger",
    "metrics",
    "stop_reason",
)
