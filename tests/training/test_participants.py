"""Hooks that come or go during a run: set up at once, torn down once, whatever fails."""

from __future__ import annotations

import pytest
from engine.noted import Note
from tiny import Net, batches, quiet

from hookline import Hook, on


def during(change, *, at=1, data=4, **options):
    """Fit with three noting hooks and a change made by the first of them, inside the batch-end event of batch `at`."""
    got = []

    class First(Note):
        def on_train_batch_end(self, batch_idx, trainer):
            self.note(batch_idx)
            if batch_idx == at:
                change(trainer, got)

    trainer = quiet(hooks=[First(got, "first"), Note(got, "second"), Note(got, "third")], **options)
    trainer.fit(Net(), batches(data))
    return got


def by(name, got):
    return [what for who, what in got if who == name]


def batches_of(got):
    """What was heard at batch ends, in order."""
    return [each for each in got if isinstance(each[1], int)]


def test_a_hook_added_inside_an_event_gets_setup_at_once_no_start_and_the_next_event():
    got = during(lambda trainer, got: trainer.add_hook(Note(got, "late")))
    assert by("late", got) == ["setup", 2, 3, "end", "teardown"]
    assert got.index(("first", 1)) < got.index(("late", "setup")) < got.index(("second", 1))


def test_adding_a_hook_skips_no_other_and_calls_none_twice():
    got = during(lambda trainer, got: trainer.add_hook(Note(got, "late")))
    assert batches_of(got)[3:6] == [("first", 1), ("second", 1), ("third", 1)]
    assert batches_of(got)[6:10] == [("first", 2), ("second", 2), ("third", 2), ("late", 2)]


@pytest.mark.parametrize("victim", ["first", "second", "third"])
def test_a_hook_removed_inside_an_event_still_hears_that_event_gets_teardown_and_nothing_more(victim):
    got = during(lambda trainer, got: trainer.remove_hook(victim))
    assert batches_of(got)[3:6] == [("first", 1), ("second", 1), ("third", 1)]
    rest = [name for name in ("first", "second", "third") if name != victim]
    assert batches_of(got)[6:] == [(name, batch) for batch in (2, 3) for name in rest]
    assert by(victim, got).count("teardown") == 1
    assert "end" not in by(victim, got)
    assert all(by(name, got).count("teardown") == 1 for name in rest)


@pytest.mark.parametrize("victim", ["first", "second", "third"])
def test_a_hook_disabled_inside_an_event_hears_nothing_from_the_next_one_but_its_teardown(victim):
    got = during(lambda trainer, got: trainer.disable_hook(victim))
    assert batches_of(got)[3:6] == [("first", 1), ("second", 1), ("third", 1)]
    assert by(victim, got)[-2:] == [1, "teardown"]
    assert by(victim, got).count("teardown") == 1


def test_a_hook_enabled_inside_an_event_hears_the_next_one_in_its_place():
    got = []
    trainer = quiet(hooks=[Note(got, "first"), Note(got, "second")])
    trainer.on("train_batch_end", when=lambda batch_idx: batch_idx == 0)(
        lambda: trainer.disable_hook("first")
    )
    trainer.on("train_batch_end", when=lambda batch_idx: batch_idx == 2)(lambda: trainer.enable_hook("first"))
    trainer.fit(Net(), batches(4))
    assert by("first", got) == ["setup", "start", 0, 3, "end", "teardown"]
    assert batches_of(got)[-2:] == [("first", 3), ("second", 3)]


def test_remove_and_add_again_in_one_event():
    def swap(trainer, got):
        hook = trainer.remove_hook("second")
        trainer.add_hook(hook)

    got = during(swap)
    assert by("second", got) == ["setup", "start", 0, "teardown", "setup", 1, 2, 3, "end", "teardown"]
    assert batches_of(got)[6:9] == [("first", 2), ("third", 2), ("second", 2)]


def test_a_hook_added_late_gets_its_saved_state_at_once(tmp_path):
    class Stateful(Note):
        def state_dict(self):
            return {"got": len(self.got)}

        def load_state_dict(self, state):
            self.note(f"restored {state['got']}")

    first = quiet(hooks=[Stateful([], "it")])
    first.on("train_end")(lambda: first.save_checkpoint(tmp_path / "saved"))
    first.fit(Net(), batches(2))
    got = []
    second = quiet(max_epochs=2)
    second.on("train_epoch_start")(lambda: second.add_hook(Stateful(got, "it")))
    second.fit(Net(), batches(2), resume=tmp_path / "saved")
    assert by("it", got)[:3] == ["setup", "restored 5", 0]


@pytest.mark.parametrize("on_error", ["warn", "disable"])
@pytest.mark.parametrize("method", ["setup", "teardown"])
def test_coming_late_and_leaving_early_fail_as_the_hook_was_told_to(method, on_error):
    def fail(self):
        raise ZeroDivisionError("on purpose")

    failing = type("Failing", (Hook,), {method: fail, "on_error": on_error})

    def come_and_go(trainer, got):
        trainer.add_hook(failing())
        trainer.remove_hook("failing")

    got = during(come_and_go)
    assert by("third", got)[-1] == "teardown"


def test_a_late_hook_whose_setup_fails_is_not_half_registered():
    class Failing(Hook):
        def setup(self):
            raise ZeroDivisionError("on purpose")

    def add(trainer, got):
        with pytest.raises(ZeroDivisionError):
            trainer.add_hook(Failing())
        assert "failing" not in trainer.hooks

    assert by("third", during(add))[-1] == "teardown"


def test_a_late_hook_that_brings_another_of_its_class_keeps_its_name_to_itself():
    class Pair(Hook):
        def __init__(self, got, brings):
            super().__init__()
            self.got, self.brings = got, brings

        def setup(self, trainer):
            if self.brings:
                trainer.add_hook(Pair(self.got, brings=False))

        def on_train_batch_end(self, batch_idx):
            self.got.append(("pair", batch_idx))

    names = []

    def add(trainer, got):
        trainer.add_hook(Pair(got, brings=True))
        names.extend(name for name in trainer.hooks.list_hooks() if name.startswith("pair"))

    assert by("pair", during(add)) == [2, 2, 3, 3]
    assert sorted(names) == ["pair", "pair_2"]


def test_a_hook_for_another_rank_is_not_set_up_when_it_comes_late():
    class Elsewhere(Note):
        ranks = {7}

    got = during(lambda trainer, got: trainer.add_hook(Elsewhere(got, "elsewhere")))
    assert by("elsewhere", got) == []


def test_a_hook_that_is_switched_on_for_the_first_time_in_the_middle_is_set_up_first():
    got = []
    trainer = quiet(hooks=[Note(got, "off")])
    trainer.disable_hook("off")
    trainer.on("train_batch_end", when=lambda batch_idx: batch_idx == 0)(lambda: trainer.enable_hook("off"))
    trainer.fit(Net(), batches(2))
    assert by("off", got) == ["setup", 1, "end", "teardown"]


def test_a_hook_added_in_another_ones_setup_is_set_up_once():
    got = []

    class Adds(Hook):
        def setup(self, trainer):
            trainer.add_hook(Note(got, "added"))

    quiet(hooks=[Adds()]).fit(Net(), batches(1))
    assert by("added", got) == ["setup", "start", 0, "end", "teardown"]


def test_a_hook_added_before_anyone_was_set_up_is_set_up_once():
    got = []

    class Prepares(Net):
        def prepare_data(self):
            self.trainer.add_hook(Note(got, "added"))

    quiet().fit(Prepares(), batches(1))
    assert by("added", got) == ["setup", "start", 0, "end", "teardown"]


def test_teardown_reaches_a_late_hook_even_if_setup_fails_after_it():
    got = []

    class Adds(Hook):
        def setup(self, trainer):
            trainer.add_hook(Note(got, "added"))

    class Fails(Hook):
        def setup(self):
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        quiet(hooks=[Adds(), Fails(), Note(got, "never began")]).fit(Net(), batches(1))
    assert got == [("added", "setup"), ("added", "teardown")]


def test_teardown_does_not_reach_a_hook_whose_setup_waited_for_a_module_that_failed():
    got = []

    class After(Note):
        after_module = {"setup"}

    class Fails(Net):
        def setup(self):
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        quiet(hooks=[After(got, "after")]).fit(Fails(), batches(1))
    assert got == []


def test_a_hook_that_removes_itself_in_its_teardown_is_torn_down_once():
    got = []

    class Leaves(Note):
        def teardown(self):
            self.note("teardown")
            handle.remove()

    trainer = quiet()
    handle = trainer.add_hook(Leaves(got, "it"))
    trainer.fit(Net(), batches(1))
    assert by("it", got).count("teardown") == 1


def test_a_hook_that_another_one_removes_during_teardown_is_torn_down_once():
    got = []

    class Removes(Hook):
        def teardown(self, trainer):
            trainer.remove_hook("it")

    quiet(hooks=[Removes(), Note(got, "it")]).fit(Net(), batches(1))
    assert by("it", got).count("teardown") == 1


def test_a_hook_that_another_one_removes_during_setup_is_never_torn_down_before_its_setup():
    got = []

    class Removes(Hook):
        def setup(self, trainer):
            trainer.remove_hook("it")

    quiet(hooks=[Removes(), Note(got, "it")]).fit(Net(), batches(1))
    assert by("it", got) in ([], ["setup", "teardown"])


def test_hooks_of_the_module_live_as_long_as_the_run():
    got = []

    class Brings(Net):
        def configure_hooks(self):
            return [Note(got, "brought"), on("train_end")(lambda: got.append(("function", "end")))]

    trainer = quiet()
    trainer.fit(Brings(), batches(1))
    assert by("brought", got) == ["setup", "start", 0, "end", "teardown"]
    assert by("function", got) == ["end"]
    assert trainer.hooks.list_hooks() == []
