"""A hook that notes what it hears."""

from __future__ import annotations

from hookline import Hook


class Note(Hook):
    """Notes what it hears under its name."""

    def __init__(self, got, name=None):
        super().__init__(name)
        self.got = got

    def note(self, what):
        self.got.append((self.name, what))

    def setup(self, stage):
        self.note("setup")

    def on_train_start(self):
        self.note("start")

    def on_train_batch_end(self, batch_idx):
        self.note(batch_idx)

    def on_train_end(self):
        self.note("end")

    def teardown(self, stage):
        self.note("teardown")
