"""When a listener is called: exact on the edge, from the start in every run, and wrong intervals refused where written."""

from __future__ import annotations

import types

import pytest
from tiny import Net, batches, quiet

from hookline import SKIP_STEP, Hook, HookError, after, before, every, on, once, when
from hookline.engine.filters import parse_interval


def described(value):
    """An id for a parametrized test that is the same every time."""
    if not isinstance(value, dict):
        return None if isinstance(value, list) else str(value)
    return (
        ", ".join(f"{name}={'predicate' if callable(given) else given}" for name, given in value.items())
        or "no filter"
    )


def heard(event="train_batch_end", *, data=6, epochs=1, note=lambda s: s.batches_seen, **filters):
    """What a filtered function hook noted during a fit."""
    got = []
    trainer = quiet(max_epochs=epochs)
    trainer.on(event, **filters)(lambda state: got.append(note(state)))
    trainer.fit(Net(), batches(data))
    return got


@pytest.fixture
def clock(monkeypatch):
    """A clock of the run that only moves when told to."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr("hookline.run.state_parts.time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


# ---- one filter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"every": 2}, [2, 4, 6]),
        ({"every": "2 calls"}, [2, 4, 6]),
        ({"every": "3 steps"}, [3, 6]),
        ({"every": "4 batches"}, [4]),
        ({"every": "6 samples"}, [2, 4, 6]),
        ({"every": "7 samples"}, [3, 5]),
        ({"every": "24 tokens"}, [2, 4, 6]),
        ({"every": "1k steps"}, []),
        ({"once": True}, [1]),
        ({"after": "4 steps"}, [4, 5, 6]),
        ({"before": "4 steps"}, [1, 2, 3]),
        ({"after": 4}, [5, 6]),
        ({"before": 2}, [1, 2]),
        ({"after": "5 batches"}, [5, 6]),
        ({"when": lambda batch_idx: batch_idx % 3 == 1}, [2, 5]),
    ],
    ids=described,
)
def test_a_filter_lets_exactly_these_batches_through(filters, expected):
    assert heard(**filters) == expected


def test_every_n_epochs_fires_when_so_many_are_complete():
    assert heard("train_epoch_end", epochs=5, data=1, note=lambda s: s.epoch, every="2 epochs") == [1, 3]


def test_an_epoch_counts_once_it_is_over():
    assert heard("train_epoch_start", epochs=5, data=1, note=lambda s: s.epoch, every="2 epochs") == [2, 4]


def test_counts_continue_over_epochs():
    assert heard(data=3, epochs=2, every="2 steps") == [2, 4, 6]
    assert heard(data=3, epochs=2, every=4) == [4]


def test_a_count_that_jumps_over_several_multiples_fires_once():
    assert heard(data=3, every="1 samples") == [1, 2, 3]  # three samples a batch


def test_a_skipped_step_that_keeps_the_count_does_not_fire_again():
    got = []
    trainer = quiet()
    trainer.on("before_optimizer_step")(lambda state: SKIP_STEP if 2 <= state.batch_idx < 5 else None)
    trainer.on("train_batch_end", every="2 steps")(lambda batch_idx, step: got.append((batch_idx, step)))
    trainer.fit(Net(), batches(7))
    assert got == [(1, 2), (6, 4)]


def test_a_predicate_asks_for_facts_like_a_hook():
    seen = []

    def far_enough(trainer, loss, step):
        seen.append((trainer.state.step, step, type(loss)))
        return step >= 2

    assert heard(data=3, when=far_enough) == [2, 3]
    assert seen == [(1, 1, float), (2, 2, float), (3, 3, float)]


def test_a_predicate_that_asks_for_something_unknown_is_refused_at_registration():
    with pytest.raises(
        HookError, match=r"the `when` of function hook: \w+ has no argument 'stepp'.*Did you mean 'step'"
    ):

        @quiet().on("train_start", when=lambda stepp: True)
        def hook(): ...


def test_a_predicate_must_be_a_function():
    with pytest.raises(HookError, match="when=3 must be a function"):
        quiet().on("train_start", when=3)


def test_every_n_seconds_counts_from_the_start_and_then_from_the_last_time(clock):
    got = []
    trainer = quiet()
    trainer.on("train_batch_start")(lambda: setattr(clock, "now", clock.now + 4))
    trainer.on("train_batch_end", every="10 seconds")(lambda batch_idx: got.append(batch_idx))
    clock.now += 5000  # what happened before the run does not count
    trainer.fit(Net(), batches(7))
    assert got == [2, 5]


def test_minutes_and_hours_are_seconds_too(clock):
    got = []
    trainer = quiet()
    trainer.on("train_batch_start")(lambda: setattr(clock, "now", clock.now + 600))
    trainer.on("train_batch_end", every="20 minutes")(lambda batch_idx: got.append(("minutes", batch_idx)))
    trainer.on("train_batch_end", every="0.5 hours")(lambda batch_idx: got.append(("hours", batch_idx)))
    trainer.fit(Net(), batches(4))
    assert got == [("minutes", 1), ("hours", 2), ("minutes", 3)]


def test_after_and_before_take_times_since_the_run_began(clock):
    got = []
    trainer = quiet()
    clock.now += 5000
    trainer.on("train_batch_start")(lambda: setattr(clock, "now", clock.now + 1))
    trainer.on("train_batch_end", after="3 seconds")(lambda batch_idx: got.append(("after", batch_idx)))
    trainer.on("train_batch_end", before="3 seconds")(lambda batch_idx: got.append(("before", batch_idx)))
    trainer.fit(Net(), batches(4))
    assert got == [("before", 0), ("before", 1), ("after", 2), ("after", 3)]


def test_after_and_before_take_minutes_too(clock):
    got = []
    trainer = quiet()
    trainer.on("train_batch_start")(lambda: setattr(clock, "now", clock.now + 40))
    trainer.on("train_batch_end", after="2 minutes")(lambda batch_idx: got.append(("after", batch_idx)))
    trainer.on("train_batch_end", before="2 minutes")(lambda batch_idx: got.append(("before", batch_idx)))
    trainer.fit(Net(), batches(4))
    assert got == [("before", 0), ("before", 1), ("after", 2), ("after", 3)]


# ---- several filters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"after": "2 steps", "before": "5 steps"}, [2, 3, 4]),
        ({"every": "2 steps", "after": "3 steps"}, [4, 6]),
        ({"every": 3, "once": True}, [3]),
        ({"every": "2 steps", "once": True}, [2]),
        ({"after": "4 steps", "once": True}, [4]),
        ({"when": lambda batch_idx: batch_idx == 3, "once": True}, [4]),
    ],
    ids=described,
)
def test_all_filters_must_agree(filters, expected):
    assert heard(**filters) == expected


def test_seconds_start_again_when_the_call_is_made_not_when_another_filter_holds_it_back(clock):
    got = []
    trainer = quiet()
    trainer.on("train_batch_start")(lambda: setattr(clock, "now", clock.now + 4))
    trainer.on("train_batch_end", every="10 seconds", after="4 batches")(
        lambda batch_idx: got.append(batch_idx)
    )
    trainer.fit(Net(), batches(8))
    assert got == [3, 6]  # 16 seconds after the start, then 12 after that


def test_stacked_decorators_must_all_agree_whatever_their_order():
    got = []

    class Stacked(Hook):
        @once
        @after("3 steps")
        def on_train_batch_end(self, step):
            got.append(("end", step))

        @after("3 steps")
        @once
        def on_train_batch_start(self, step):
            got.append(("start", step))

    quiet(hooks=[Stacked()]).fit(Net(), batches(6))
    assert got == [("end", 3), ("start", 3)]


# ---- on hook methods ---------------------------------------------------------------------------------------------


def test_every_filter_is_a_decorator_of_hook_methods():
    got = []

    class Filtered(Hook):
        @every("2 steps")
        def on_train_batch_end(self, step):
            got.append(("every", step))

        @once
        def on_step_end(self, step):
            got.append(("once", step))

        @after("3 steps")
        def on_after_backward(self, step):
            got.append(("after", step))

        @before("1 steps")
        def on_before_backward(self, step):
            got.append(("before", step))

        @when(lambda step: step == 2)
        def on_train_batch_start(self, step):
            got.append(("when", step))

    quiet(hooks=[Filtered()]).fit(Net(), batches(4))
    assert got == [("before", 0), ("once", 1), ("every", 2), ("when", 2), ("after", 3), ("every", 4)]


def test_decorators_work_on_the_modules_own_events():
    got = []

    class Filtered(Net):
        @every("2 steps")
        def on_train_batch_end(self, step):
            got.append(step)

    quiet().fit(Filtered(), batches(4))
    assert got == [2, 4]


def test_two_instances_of_one_class_count_by_themselves():
    got = []

    class Counting(Hook):
        @every(2)
        def on_train_batch_end(self, batch_idx):
            got.append((self.name, batch_idx))

    trainer = quiet(hooks=[Counting("first")])
    trainer.on("train_batch_end", once=True)(lambda: trainer.add_hook(Counting("late")))
    trainer.fit(Net(), batches(5))
    assert got == [("first", 1), ("late", 2), ("first", 3), ("late", 4)]


def test_one_function_for_two_events_counts_each_by_itself():
    got = []

    @on("train_batch_start", "train_batch_end", every=2)
    def note(batch_idx, step):
        got.append((batch_idx, step))

    quiet(hooks=[note]).fit(Net(), batches(3))
    assert got == [(1, 1), (1, 2)]


# ---- over runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters",
    [{"once": True}, {"every": 3}, {"every": "3 steps"}, {"after": 3}, {"before": 2}],
    ids=described,
)
def test_a_second_run_begins_anew(filters):
    got = []
    trainer = quiet()
    trainer.on("train_batch_end", **filters)(lambda batch_idx: got.append(batch_idx))
    trainer.fit(Net(), batches(4))
    first, got[:] = list(got), []
    trainer.fit(Net(), batches(4))
    assert got == first != []


def test_a_hook_added_in_the_middle_waits_for_the_next_edge():
    got = []
    trainer = quiet()

    @trainer.on("train_batch_end", when=lambda step: step == 5)
    def add():
        trainer.on("train_batch_end", every="4 steps")(lambda step: got.append(step))

    trainer.fit(Net(), batches(13))
    assert got == [8, 12]


@pytest.mark.parametrize(
    "filters",
    [{"once": True}, {"every": 3}, {"every": "3 steps"}, {"after": 3}, {"before": 5}],
    ids=described,
)
def test_filters_count_on_exactly_after_a_resume(tmp_path, filters):
    def run(stop_at=None, resume=None):
        got = []
        trainer = quiet(max_epochs=2)
        trainer.on("train_batch_end", name="watch", **filters)(lambda step: got.append(step))

        @trainer.on("step_end", when=lambda step: step == stop_at)
        def leave():
            trainer.save_checkpoint(tmp_path / "saved")
            trainer.stop("for now")

        trainer.fit(Net(), batches(4), resume=resume)
        return got

    assert run(stop_at=4) + run(resume=tmp_path / "saved") == run() != []


def test_a_hook_that_is_new_in_a_resumed_run_waits_for_the_next_edge(tmp_path):
    first = quiet(max_epochs=1)
    first.on("train_end")(lambda: first.save_checkpoint(tmp_path / "saved"))
    first.fit(Net(), batches(5))
    got = []
    second = quiet(max_epochs=2)
    second.on("train_batch_end", every="4 steps")(lambda step: got.append(step))
    second.fit(Net(), batches(5), resume=tmp_path / "saved")
    assert got == [8]


# ---- intervals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (100, (100, "call")),
        ("500 steps", (500, "step")),
        ("1 step", (1, "step")),
        ("5 batches", (5, "batch")),
        ("1 batch", (1, "batch")),
        ("2 epochs", (2, "epoch")),
        ("1_000 samples", (1000, "sample")),
        ("1M tokens", (1_000_000, "token")),
        ("1.5k steps", (1500, "step")),
        ("2B tokens", (2_000_000_000, "token")),
        ("10 minutes", (10, "minute")),
        ("5 min", (5, "minute")),
        ("30s", (30, "second")),
        ("30 sec", (30, "second")),
        ("2 h", (2, "hour")),
        ("0.5 days", (0.5, "day")),
        ("  3  Steps ", (3, "step")),
    ],
)
def test_an_interval_means(text, meaning):
    assert parse_interval(text, "every") == meaning


@pytest.mark.parametrize(
    "bad",
    [0, -1, True, 2.5, "", "5", "steps", "0 steps", "-3 steps", "1.5 steps", "0 s", "1.2.3 steps", ". steps"],
    ids=repr,
)
@pytest.mark.parametrize("argument", ["every", "after", "before"])
def test_an_interval_that_makes_no_sense_is_refused_where_it_is_written(argument, bad):
    with pytest.raises(HookError, match=argument):
        on("train_start", **{argument: bad})
    with pytest.raises(HookError, match=argument):
        quiet().on("train_start", **{argument: bad})
    with pytest.raises(HookError, match=argument):
        {"every": every, "after": after, "before": before}[argument](bad)


def test_an_unknown_unit_is_an_error_with_the_closest_one_and_the_list():
    with pytest.raises(
        HookError, match=r"unknown unit 'stepps'. Did you mean 'step'\? Units: steps, batches, epochs"
    ):
        every("5 stepps")


@pytest.mark.parametrize("bare", [every, after, before], ids=["every", "after", "before"])
def test_a_decorator_that_forgot_its_interval_says_where_it_goes(bare):
    with pytest.raises(
        HookError, match=rf"@{bare.__name__} is missing its interval.*@{bare.__name__}\('500 steps'\)"
    ):

        @bare
        def on_step_end(step): ...


def test_once_may_be_written_with_parentheses():
    got = []

    class First(Hook):
        @once()
        def on_train_batch_end(self, batch_idx):
            got.append(batch_idx)

    quiet(hooks=[First()]).fit(Net(), batches(3))
    assert got == [0]
