"""Testing hooks: fire single events at a hook, run it in a tiny real run, or use the pytest fixtures.

A hook's methods are ordinary methods, so a plain call with a mock works too.

May import: util, engine, run, training.
"""

from hookline.testing.drive import Played, TinyModule, fire, play, tiny_batches, tiny_trainer
from hookline.util.urls import memory_urls

__all__ = ["Played", "TinyModule", "fire", "memory_urls", "play", "tiny_batches", "tiny_trainer"]
