"""Testing hooks: fire single events at a hook, run it in a tiny real run, or use the pytest fixtures.

A hook's methods are ordinary methods, so a plain call with a mock works too. Names are loaded when they are
used, because pytest imports the fixtures of every installed plugin.

May import: util, engine, run, training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.engine.registry import lazy_names
from hookline.util.urls import memory_urls

if TYPE_CHECKING:
    from hookline.testing.drive import Played, TinyModule, fire, play, tiny_batches, tiny_trainer

__all__ = ["Played", "TinyModule", "fire", "memory_urls", "play", "tiny_batches", "tiny_trainer"]

__getattr__, __dir__ = lazy_names(__name__, {name: "drive" for name in __all__ if name != "memory_urls"})
