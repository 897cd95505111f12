"""GarbageCollection: collections at fixed steps only, and Python's own setting restored whatever happens."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_budgets import is_ours, per_step, with_hooks
from tiny import Net, batches, quiet

from hookline import Hook, every
from hookline.hooks import GarbageCollection
from hookline.util.errors import HookError, OptionError


class Watch(Hook):
    """The generation and the step of each collection, whoever begins it, and whether automatic ones are off."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.enabled: set[bool] = set()
        self.trainer: Any = None

    def setup(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_start(self) -> None:
        gc.callbacks.append(self.look)

    def look(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.seen.append((info["generation"], self.trainer.global_step))

    def on_train_batch_end(self) -> None:
        self.enabled.add(gc.isenabled())
        keep = [[object()] for _ in range(2000)]  # enough for an automatic collection
        del keep

    def teardown(self) -> None:
        if self.look in gc.callbacks:
            gc.callbacks.remove(self.look)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """What a run restores, is checked with automatic collection on."""
    gc.enable()
    yield
    assert gc.isenabled()
    assert not [each for each in gc.callbacks if isinstance(getattr(each, "__self__", None), Watch)]


def run(hook: GarbageCollection, epochs: int = 2, **options: Any) -> Watch:
    watch = Watch()
    quiet(hooks=[watch, hook], max_epochs=epochs, **options).fit(Net(), batches(5), batches(1))
    return watch


def test_collections_come_after_the_same_steps_only() -> None:
    hook = GarbageCollection(every=3)
    watch = run(hook)
    assert watch.seen == [(2, 0), (1, 3), (2, 5), (1, 6), (1, 9), (2, 10)]
    assert watch.enabled == {False}
    assert hook.collections == 6 and hook.seconds > 0


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"every": 4, "generation": 2, "full_at": ()}, [(2, 0), (2, 4), (2, 8)]),
        ({"every": 7, "generation": 0, "full_at": "validation"}, [(2, 0), (2, 5), (0, 7), (2, 10)]),
        ({"every": 100, "full_at": ["epoch", "validation"]}, [(2, 0), (2, 5), (2, 5), (2, 10), (2, 10)]),
    ],
    ids=str,
)
def test_generations_and_moments_are_chosen(options: dict[str, Any], seen: list[Any]) -> None:
    assert run(GarbageCollection(**options), num_sanity_val_steps=1).seen == seen


def test_a_checkpoint_may_be_a_moment_and_a_resume_keeps_the_steps(tmp_path: Path) -> None:
    class Saves(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 4:
                trainer.save_checkpoint(tmp_path / "four")

    watch = Watch()
    hook = GarbageCollection(every=3, full_at="checkpoint")
    quiet(hooks=[watch, hook, Saves()]).fit(Net(), batches(8))
    assert watch.seen == [(2, 0), (1, 3), (2, 4), (1, 6)]
    watch = Watch()
    quiet(hooks=[watch, GarbageCollection(every=3, full_at=())]).fit(
        Net(), batches(8), resume=tmp_path / "four"
    )
    assert watch.seen == [(2, 4), (1, 6)]


def test_after_a_failure_automatic_collection_is_on_again_and_objects_are_not_frozen() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    class Refuses(Hook):
        order = 1000

        def setup(self) -> None:
            raise RuntimeError("broken")

    for net, hooks in ((Fails(), []), (Net(), [Refuses()])):
        with pytest.raises(RuntimeError, match="broken"):
            quiet(hooks=[GarbageCollection(freeze=True), *hooks]).fit(net, batches(2))
        assert gc.isenabled()


def test_a_setting_of_the_user_stays() -> None:
    gc.disable()
    run(GarbageCollection())
    assert not gc.isenabled()
    gc.enable()


def test_what_exists_before_training_may_be_left_out_of_collections() -> None:
    gc.unfreeze()  # the tests have frozen what they imported
    counts: list[int] = []

    class Counts(Hook):
        def on_train_batch_end(self) -> None:
            counts.append(gc.get_freeze_count())

    quiet(hooks=[GarbageCollection(freeze=True), Counts()]).fit(Net(), batches(1))
    assert counts[0] > 10_000 and gc.get_freeze_count() < 1000  # Python 3.12 has some of its own there
    gc.freeze()
    before = gc.get_freeze_count()
    quiet(hooks=[GarbageCollection(freeze=True)]).fit(Net(), batches(1))
    assert gc.get_freeze_count() > before - 1000


def test_only_training_is_changed_and_a_hook_that_comes_or_goes_switches_at_once() -> None:
    seen: list[bool] = []

    class Looks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(gc.isenabled())
            return super().validation_step(batch, batch_idx)

    quiet(hooks=[GarbageCollection()]).validate(Looks(), batches(1))

    class Changes(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.add_hook(GarbageCollection(), "late")
            if batch_idx == 3:
                trainer.remove_hook("late")

        def on_train_batch_start(self) -> None:
            seen.append(gc.isenabled())

    quiet(hooks=[Changes()]).fit(Net(), batches(6))
    assert seen == [True] + [True, True, False, False, True, True]


def test_the_time_is_logged_on_request() -> None:
    trainer = quiet(hooks=[GarbageCollection(every=2, log=True)])
    trainer.fit(Net(), batches(4))
    assert trainer.metrics["gc/seconds"] > 0 and trainer.metrics["gc/collected"] >= 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0 must be a whole number from 1"),
        ({"generation": 3}, "generation=3"),
        ({"full_at": "epochs"}, "Did you mean 'epoch'"),
        ({"freeze": 1}, "True or False"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        GarbageCollection(**options)


def test_two_of_them_are_refused() -> None:
    with pytest.raises(HookError, match="Two hooks GarbageCollection"):
        quiet(hooks=[GarbageCollection(), GarbageCollection(name="b")]).fit(Net(), batches(1))


def test_a_silent_step_costs_a_filter_and_nothing_of_the_hook() -> None:
    class Filtered(Hook):
        @every("1000000 steps")
        def on_step_end(self, state: Any) -> None: ...

    ours = per_step(lambda data: with_hooks(GarbageCollection(every=10**6))(data), is_ours)
    assert ours == per_step(lambda data: with_hooks(Filtered())(data), is_ours)


def test_automatic_collection_is_on_while_the_hook_is_disabled() -> None:
    """As `hookline control RUN disable garbage_collection` does it."""
    seen: list[bool] = []

    class Switches(Hook):
        def on_train_batch_start(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx in (1, 3):
                (trainer.hooks.disable if batch_idx == 1 else trainer.hooks.enable)("garbage_collection")
            seen.append(gc.isenabled())

    trainer = quiet(hooks=[Switches(), GarbageCollection()])
    trainer.fit(Net(), batches(5))
    assert seen == [False, True, True, False, False]
    trainer.hooks.disable("garbage_collection")
    assert gc.isenabled()
    trainer.hooks.enable("garbage_collection")
    assert gc.isenabled(), "outside of a run the hook holds nothing"
    gc.disable()  # a user who collects by hand
    seen.clear()
    trainer.fit(Net(), batches(5))
    assert seen == [False] * 5 and not gc.isenabled()
    gc.enable()
