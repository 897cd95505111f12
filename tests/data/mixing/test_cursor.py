"""The cursor of a run: changes from the next window on, loaders that come, go and end, and resume."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hookline import OptionError
from hookline.data.mixing import Mixture, MixtureCursor
from hookline.util.errors import CheckpointError

Lengths = dict[str, int | None]


def draw(cursor: MixtureCursor, n: int = 10**6) -> str:
    drawn = ""
    for _ in range(n):
        index = next(cursor, None)
        if index is None:
            break
        drawn += cursor.names[index]
    return drawn


def weighted(a: float, b: float, **settings: Any) -> Mixture:
    return Mixture("weighted", {"a": a, "b": b}, **{"window": 10, "epoch_length": 40, **settings})


def resumed(cursor: MixtureCursor, like: MixtureCursor) -> MixtureCursor:
    like.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    return like


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_new_weights_hold_from_the_next_window_on() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    assert draw(cursor, 3) == "aaa"
    assert cursor.revise(weighted(0, 1)) == 10 == cursor.next_window
    assert cursor.mixture == weighted(1, 0) and cursor.latest[0] == weighted(0, 1)
    assert draw(cursor) == "a" * 7 + "b" * 30
    assert cursor.mixture == weighted(0, 1)
    assert cursor.counts == {"a": 10, "b": 30}


def test_a_change_between_two_windows_holds_at_once() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    assert draw(cursor, 10) == "a" * 10
    assert cursor.revise(weighted(0, 1)) == 10
    assert draw(cursor, 1) == "b"


def test_after_a_change_the_rest_of_the_epoch_has_the_new_proportions() -> None:
    cursor = MixtureCursor(weighted(1, 1, epoch_length=100), {"a": 5, "b": 5})
    draw(cursor, 15)
    cursor.revise(weighted(3, 1, epoch_length=100))
    draw(cursor, 5)
    assert draw(cursor).count("a") == 60


def test_two_changes_in_one_window_build_on_each_other() -> None:
    cursor = MixtureCursor(weighted(1, 1), {"a": 5, "b": 5})
    draw(cursor, 1)
    cursor.revise(replace(cursor.latest[0], burst=2))
    cursor.revise(replace(cursor.latest[0], weights={"a": 0, "b": 1}))
    draw(cursor, 9)
    assert draw(cursor, 4) == "bbbb"
    assert cursor.mixture.burst == 2


def test_a_change_in_the_last_window_holds_from_the_next_epoch() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    draw(cursor, 35)
    assert cursor.revise(weighted(0, 1)) == 40
    assert draw(cursor) == "aaaaa"
    cursor.begin(1)
    assert draw(cursor) == "b" * 40


def test_a_loader_added_in_the_last_window_does_not_prolong_the_epoch() -> None:
    """The loop has already been told that this batch is the last one."""
    cursor = MixtureCursor(Mixture(window=2), {"a": 4})
    draw(cursor, 3)
    cursor.revise(lengths={"a": 4, "b": 4})
    assert draw(cursor) == "a"
    cursor.begin(1)
    assert draw(cursor) == "abababab"


def test_a_change_waits_for_its_window_even_if_a_loader_ends_before() -> None:
    cursor = MixtureCursor(weighted(1, 1, when_exhausted="end"), {"a": None, "b": None})
    assert draw(cursor, 3) == "aba"
    cursor.revise(weighted(1, 1, when_exhausted="end", burst=5))
    assert cursor.ended(0) is False
    assert draw(cursor, 8) == "b" * 8
    assert (cursor.position, cursor.mixture.burst) == (10, 1)
    assert draw(cursor, 10) == "aaaaabbbbb"


def test_a_wrong_change_fails_where_it_is_made_and_changes_nothing() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    with pytest.raises(OptionError, match="weights names 'c'"):
        cursor.revise(Mixture("weighted", {"a": 1, "c": 1}))
    assert cursor.latest == (weighted(1, 0), {"a": 5, "b": 5})
    assert draw(cursor) == "a" * 40


def test_a_loader_can_be_added_and_the_sum_grows_by_it() -> None:
    cursor = MixtureCursor(Mixture(window=4), {"a": 6, "b": 6})
    assert draw(cursor, 2) == "ab"
    cursor.revise(lengths={**cursor.latest[1], "c": 3})
    assert cursor.total == 12
    assert draw(cursor) == "ab" + "abc" * 3 + "ab"
    assert cursor.total == 15 and cursor.counts == {"a": 6, "b": 6, "c": 3}


def test_a_loader_can_be_taken_out_and_the_others_keep_their_indices() -> None:
    cursor = MixtureCursor(Mixture(window=4), {"a": 6, "b": 6, "c": 6})
    assert draw(cursor, 4) == "abca"
    cursor.revise(lengths={"b": 6, "c": 6})
    assert draw(cursor) == "bc" * 5
    assert cursor.names == ("a", "b", "c")
    cursor.revise(lengths={"b": 6, "c": 6, "a": 6})
    cursor.begin(1)
    assert [next(cursor) for _ in range(3)] == [0, 1, 2]


def test_a_sequence_continues_with_what_is_left_of_its_round_after_a_change() -> None:
    cursor = MixtureCursor(Mixture("sequential", window=2), {"a": 3, "b": 2})
    draw(cursor, 1)
    cursor.revise(lengths={"a": 3, "b": 2, "c": 1})
    assert draw(cursor) == "aabbc"


def test_an_epoch_that_was_left_early_is_followed_by_a_whole_one() -> None:
    cursor = MixtureCursor(Mixture(), {"a": 2, "b": 2})
    draw(cursor, 3)
    cursor.begin(1)
    assert (cursor.position, draw(cursor)) == (0, "abab")


# ---- loaders that end ------------------------------------------------------------------------------------------------


def test_a_loader_of_unknown_length_is_started_again_when_it_ends() -> None:
    cursor = MixtureCursor(Mixture(epoch_length=6), {"a": None, "b": 9})
    assert draw(cursor, 3) == "aba"
    assert cursor.ended(0) is True
    assert cursor.reading(0) == (1, 1)
    assert draw(cursor) == "bab"


def test_a_loader_of_unknown_length_that_may_not_start_again_leaves_the_epoch_to_the_others() -> None:
    cursor = MixtureCursor(Mixture(epoch_length=6, when_exhausted="end"), {"a": None, "b": None})
    assert draw(cursor, 3) == "aba"
    assert cursor.ended(0) is False
    assert cursor.counts == {"a": 1, "b": 1}
    assert draw(cursor, 3) == "bbb"
    assert cursor.ended(1) is False
    assert (cursor.total, draw(cursor)) == (4, "")
    cursor.begin(1)
    assert draw(cursor, 2) == "ab"


@pytest.mark.parametrize("ends", ["cycle", "end"])
def test_a_loader_that_yields_nothing_is_an_error_with_its_name(ends: Any) -> None:
    cursor = MixtureCursor(Mixture(epoch_length=6, when_exhausted=ends), {"a": None, "b": 3})
    next(cursor)
    with pytest.raises(OptionError, match=r"'a' did not yield a batch \(epoch 0, its pass 1\)"):
        cursor.ended(0)


def test_a_generator_that_cannot_start_again_is_an_error_not_an_endless_loop() -> None:
    cursor = MixtureCursor(Mixture(epoch_length=6), {"a": None})
    draw(cursor, 3)
    assert cursor.ended(0) is True
    with pytest.raises(OptionError, match=r"its pass 2\).* a generator can be iterated over only once"):
        cursor.ended(0)


def test_the_end_of_a_loader_that_was_not_asked_is_a_mistake_of_the_caller() -> None:
    cursor = MixtureCursor(Mixture(), {"a": 2, "b": 2})
    with pytest.raises(ValueError, match="must directly follow the pick of that loader"):
        cursor.ended(0)
    next(cursor)
    with pytest.raises(ValueError, match="must directly follow the pick of that loader"):
        cursor.ended(1)


def test_it_knows_where_each_loader_is_read_and_counts_passes_over_all_epochs() -> None:
    cursor = MixtureCursor(Mixture(epoch_length=10), {"a": 2, "b": 9})
    draw(cursor, 5)
    assert (cursor.reading(0), cursor.reading(1)) == ((1, 1), (0, 2))
    draw(cursor)
    assert cursor.reading(0) == (2, 1)
    cursor.begin(1)
    assert (cursor.reading(0), cursor.reading(1)) == ((3, 0), (1, 0))


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_a_change_that_waits_for_its_window_is_resumed_too() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    draw(cursor, 3)
    cursor.revise(weighted(0, 1))
    again = resumed(cursor, MixtureCursor(weighted(1, 0), {"a": 5, "b": 5}))
    assert again.position == 3
    assert draw(again) == draw(cursor) == "a" * 7 + "b" * 30


def test_settings_edited_before_the_resume_are_a_change_from_the_next_window_on() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    draw(cursor, 3)
    again = resumed(cursor, MixtureCursor(weighted(0, 1), {"a": 5, "b": 5}))
    assert draw(again) == "a" * 7 + "b" * 30


def test_settings_that_a_hook_had_changed_outlive_the_script_that_knows_only_the_first_ones() -> None:
    cursor = MixtureCursor(weighted(1, 0), {"a": 5, "b": 5})
    cursor.revise(weighted(0, 1))
    draw(cursor, 13)
    again = resumed(cursor, MixtureCursor(weighted(1, 0), {"a": 5, "b": 5}))
    assert draw(again) == "b" * 27
    again.begin(1)
    assert draw(again, 2) == "bb"


def test_a_loader_that_was_added_on_the_way_is_asked_for_by_name() -> None:
    cursor = MixtureCursor(Mixture(window=2), {"a": 4})
    cursor.revise(lengths={"a": 4, "math": 4})
    draw(cursor, 3)
    with pytest.raises(CheckpointError, match="uses the training loaders 'math', but this run has only 'a'"):
        resumed(cursor, MixtureCursor(Mixture(window=2), {"a": 4}))
    ready = MixtureCursor(Mixture(window=2), {"a": 4})
    ready.revise(lengths={"a": 4, "math": 4})
    again = resumed(cursor, ready)
    assert draw(again) == draw(cursor) != ""


def test_the_state_does_not_grow_with_the_epoch() -> None:
    cursor = MixtureCursor(weighted(2, 1, epoch_length=5000), {"a": 5, "b": 5})
    draw(cursor, 30)
    early = len(json.dumps(cursor.state_dict()))
    for _ in range(40):
        cursor.revise(weighted(1, 1, epoch_length=5000))
        draw(cursor, 100)
    assert len(json.dumps(cursor.state_dict())) < early + 50
