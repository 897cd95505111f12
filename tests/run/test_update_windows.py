"""Which batches made which update: regular stretches, and what interrupts them."""

from __future__ import annotations

from hookline.run.update_windows import UpdateWindows


def made(*updates: tuple[int, int], length: int, size: int = 1) -> UpdateWindows:
    """Make updates that end with these batches, each an epoch and a batch, as the loop does."""
    windows, epoch = UpdateWindows(), -1
    for step, (of, batch) in enumerate(updates, 1):
        if of != epoch:
            windows.begin_epoch(step - 1, of, 0, length, size)
            epoch = of
        if batch != windows.lag + step * windows.size:
            windows.note(step, of, batch)
    return windows


def test_a_regular_run_of_any_length_is_one_entry() -> None:
    ends = [(epoch, end) for epoch in range(50) for end in (2, 5, 7, 7)[:3]]
    windows = made(*ends, length=8, size=3)
    assert len(windows.stretches) == 1
    assert [windows.batches(step) for step in (1, 3, 4, 150)] == [
        (0, [0, 1, 2]),
        (0, [6, 7]),
        (1, [0, 1, 2]),
        (49, [6, 7]),
    ]


def test_a_changed_size_is_one_more_entry() -> None:
    windows = made((0, 0), (0, 1), (0, 4), (0, 7), length=8)
    assert len(windows.stretches) == 2
    assert [windows.batches(step) for step in (2, 3, 4)] == [(0, [1]), (0, [2, 3, 4]), (0, [5, 6, 7])]


def test_skipped_batches_and_updates_are_behind_no_update() -> None:
    windows = UpdateWindows()
    windows.begin_epoch(0, 0, 0, 10, 2)
    windows.skip(0, 1)
    assert windows.lag + windows.size == 1
    windows.end_without_update(0, 0, 3)
    assert windows.open_window(0, 0, 3) == (0, 0, 3) and windows.open_window(0, 0, 4) == (0, 4, 4)
    windows.end_without_update(0, 0, 4)
    restored = UpdateWindows()
    restored.load_state_dict(windows.state_dict())
    assert restored.open_window(0, 0, 4) == (0, 4, 4), "the newest of two that were not made"
    restored.load_state_dict({**windows.state_dict(), "ended": [0, 3]})  # of an older version
    assert restored.open_window(0, 0, 3) == (0, 3, 3)
    windows.end_without_update(0, 0, 3)
    windows.note(2, 0, 5)
    assert windows.batches(1) == (0, [0]) and windows.batches(2) == (0, [4, 5])
    assert windows.open_batches(2, 0, 6) == [6]


def test_the_windows_continue_from_their_state_inside_a_window() -> None:
    windows = UpdateWindows()
    windows.begin_epoch(0, 0, 0, 9, 3)
    restored = UpdateWindows()
    restored.load_state_dict(windows.state_dict())
    restored.begin_epoch(1, 0, 4, 9, 3)
    assert len(restored.stretches) == 1 and restored.lag + 2 * restored.size == 5
    assert restored.batches(2) == (0, [3, 4, 5])


def test_an_epoch_that_ended_early_begins_a_new_stretch() -> None:
    windows = made((0, 0), (0, 1), (1, 0), (1, 1), length=5)
    assert [windows.batches(step) for step in (2, 3, 4)] == [(0, [1]), (1, [0]), (1, [1])]
    assert windows.find(0) is None
