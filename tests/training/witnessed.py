"""Hooks, modules and data modules that note in HEARD what they hear, and a trainer with all of them."""

from __future__ import annotations

from typing import Any

import torch
from tiny import Net, batches

from hookline import DataModule, Hook
from hookline.distributed import SingleDevice

HEARD: list[str] = []


class Witness(Hook):
    """Writes down set-up, failure and teardown; fails where it is told to."""

    def __init__(self, name: str, fails_in: str = "", error: BaseException | None = None) -> None:
        super().__init__(name)
        self.fails_in = fails_in
        self.error = error or ZeroDivisionError(f"{name} failed")

    def hear(self, event: str) -> None:
        HEARD.append(f"{self.name} {event}")
        if event == self.fails_in:
            raise self.error

    def setup(self, stage: str) -> None:
        self.hear("setup")

    def on_train_batch_end(self) -> None:
        if self.fails_in == "on_train_batch_end":
            self.hear("on_train_batch_end")

    def on_train_end(self) -> None:
        self.hear("on_train_end")

    def on_fit_end(self) -> None:
        self.hear("on_fit_end")

    def on_exception(self, exception: BaseException) -> None:
        self.hear("on_exception")

    def teardown(self, stage: str) -> None:
        self.hear("teardown")


class Module(Net):
    fails_in = ""

    def hear(self, event: str) -> None:
        HEARD.append(f"M {event}")
        if event == self.fails_in:
            raise ZeroDivisionError("M failed")

    def setup(self, stage: str) -> None:
        self.hear("setup")

    def configure_model(self) -> None:
        self.hear("configure_model")

    def configure_optimizers(self) -> Any:
        self.hear("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_end(self) -> None:
        self.hear("on_fit_end")

    def on_exception(self, exception: BaseException) -> None:
        self.hear("on_exception")

    def teardown(self, stage: str) -> None:
        self.hear("teardown")


class Data(DataModule):
    fails_in = ""

    def hear(self, event: str) -> None:
        HEARD.append(f"D {event}")
        if event == self.fails_in:
            raise ZeroDivisionError("D failed")

    def prepare_data(self) -> None:
        self.hear("prepare_data")

    def setup(self, stage: str) -> None:
        self.hear("setup")

    def train_dataloader(self) -> Any:
        self.hear("train_dataloader")
        return batches()

    def on_exception(self, exception: BaseException) -> None:
        self.hear("on_exception")

    def teardown(self, stage: str) -> None:
        self.hear("teardown")


class Place(SingleDevice):
    fails_in = ""

    def hear(self, event: str) -> None:
        HEARD.append(f"S {event}")
        if event == self.fails_in:
            raise ZeroDivisionError("S failed")

    def setup(self, stage: str) -> None:
        self.hear("setup")

    def on_exception(self, exception: BaseException) -> None:
        self.hear("on_exception")

    def teardown(self, stage: str) -> None:
        self.hear("teardown")


def place() -> Place:
    return Place(torch.device("cpu"))
