"""Batches, epochs and validations are found around events, properly nested, whatever order they come in."""

from __future__ import annotations

from hookline.tracing.writer import MARGIN, Spans


def played(*events: tuple[str, bool, int, int, int, int]) -> list[tuple[str, int, int]]:
    """Events as name, whether it is a batch's, start, end, epoch, batch; the spans, without their margins' size."""
    spans, over = Spans(), []
    for name, is_often, start, end, epoch, batch in events:
        over += spans.take(name, is_often, start, end, (0, epoch, batch))
    over += spans.rest()
    return [(each.name, round(each.start, -3), round(each.end, -3)) for each in over]


def test_a_batch_goes_from_its_first_event_to_its_last_one():
    assert played(
        ("on_train_batch_start", True, 10_000, 11_000, 0, 0),
        ("on_step_end", True, 15_000, 16_000, 0, 0),
        ("on_train_batch_start", True, 20_000, 21_000, 0, 1),
        ("on_step_end", True, 25_000, 26_000, 0, 1),
    ) == [("batch 0", 10_000, 16_000), ("batch 1", 20_000, 26_000)]


def test_a_batch_begins_with_its_fetch_and_one_that_never_came_is_no_batch():
    assert played(
        ("on_before_batch_fetch", True, 10_000, 11_000, 0, 0),
        ("on_train_batch_end", True, 15_000, 16_000, 0, 0),
        ("on_before_batch_fetch", True, 20_000, 21_000, 0, 1),
        ("on_train_epoch_end", False, 30_000, 31_000, 0, 0),
        ("on_before_batch_fetch", True, 40_000, 41_000, 1, 0),
    ) == [("batch 0", 10_000, 16_000)]


def test_a_validation_ends_the_batch_before_it_and_has_batches_of_its_own():
    assert played(
        ("on_train_epoch_start", False, 1_000, 2_000, 0, 0),
        ("on_train_batch_end", True, 10_000, 11_000, 0, 0),
        ("on_validation_start", False, 20_000, 21_000, 0, 0),
        ("on_validation_batch_end", True, 30_000, 31_000, 0, 0),
        ("on_validation_end", False, 40_000, 41_000, 0, 0),
        ("on_train_epoch_end", False, 50_000, 51_000, 0, 0),
    ) == [
        ("batch 0", 10_000, 11_000),
        ("batch 0", 30_000, 31_000),
        ("validation", 20_000, 41_000),
        ("epoch 0", 1_000, 51_000),
    ]


def test_the_same_batch_of_the_next_epoch_is_another_one():
    assert [
        name
        for name, _, _ in played(
            ("on_train_batch_end", True, 10_000, 11_000, 0, 0),
            ("on_train_epoch_end", False, 12_000, 13_000, 0, 0),
            ("on_train_epoch_start", False, 14_000, 15_000, 1, 0),
            ("on_train_batch_end", True, 20_000, 21_000, 1, 0),
        )
    ] == ["batch 0", "batch 0", "epoch 1"]


def test_what_is_open_when_a_trace_ends_is_closed_around_what_is_in_it():
    spans = Spans()
    spans.take("on_train_epoch_start", False, 1_000, 2_000, (0, 0, 0))
    spans.take("on_train_batch_end", True, 10_000, 11_000, (1, 0, 0))
    batch, epoch = spans.rest()
    assert epoch.start < batch.start and batch.end < epoch.end
    assert batch.end == 11_000 + MARGIN
    assert spans.rest() == []


def test_spans_are_longer_than_what_lies_in_them():
    spans = Spans()
    spans.take("on_train_epoch_start", False, 1_000, 2_000, (0, 0, 0))
    spans.take("on_before_batch_transfer", True, 10_000, 11_000, (0, 0, 0))
    batch, epoch = spans.take("on_train_epoch_end", False, 20_000, 21_000, (0, 0, 0))
    assert epoch.start < 1_000 < batch.start < 10_000 and 11_000 < batch.end < 21_000 < epoch.end
