"""The order of causes inside a step, modes and flags without an effect, and intervals between digests."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.digests import compare as kinds
from hookline.digests.compare import compare

PLAIN: dict[str, Any] = {
    "epoch": 0,
    "random": {"start": {"python": "p", "torch": "t"}, "forward": {}, "loss": {"torch": "u"}},
    "batches": [
        {
            "fetched": "f",
            "samples": ["s1", "s2"],
            "loss": "3ff0000000000000",
            "modules": [["a", "1"], ["b", "2"]],
        }
    ],
    "weights": "w",
    "buffers": "b",
    "state": "o",
    "gradients": "g",
    "used": "c",
    "updated": "n",
    "settings": "s",
    "modes": "m",
    "flags": "x",
    "values": {
        "settings": {"optimizer 0, group 0: lr": "0.1"},
        "modes": {"in eval mode": ""},
        "flags": {"threads": "1"},
    },
}


def digests(*changes: dict[str, Any], first: int = 1) -> dict[tuple[int, int], dict[str, Any]]:
    """Digests of steps from 1 on, each with these fields changed."""
    return {
        (step, step - 1): {**PLAIN, "step": step, "batch": step - 1, **change}
        for step, change in enumerate(changes, first)
    }


def in_batch(**changes: Any) -> dict[str, Any]:
    return {"batches": [{**PLAIN["batches"][0], **changes}]}


def found(change: dict[str, Any]) -> Any:
    return compare(digests({}, {}), digests({}, change)).divergence


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"random": {"start": {"python": "q", "torch": "t"}}}, kinds.RANDOM),
        (in_batch(fetched="h", samples=["s1", "new"]), kinds.BATCH),
        (in_batch(fetched="h", samples=["s2", "s1"]), kinds.DATA_ORDER),
        (in_batch(batch="h"), kinds.CHANGED_BATCH),
        ({"weights": "W"}, kinds.WEIGHTS),
        ({"buffers": "B"}, kinds.BUFFERS),
        ({"state": "O"}, kinds.STATE),
        (in_batch(modules=[["a", "1"], ["b", "9"]]), kinds.FORWARD),
        (in_batch(loss="3ff0000000000001"), kinds.LOSS),
        (in_batch(**{"used loss": "4000000000000000"}), kinds.LOSS),
        ({"gradients": "G"}, kinds.GRADIENT),
        ({"used": "C"}, kinds.CLIPPING),
        ({"settings": "S", "values": {"settings": {"optimizer 0, group 0: lr": "0.2"}}}, kinds.RATE),
        (
            {"settings": "S", "values": {"settings": {"optimizer 0, group 0: lr": "0.1", "o: eps": "1"}}},
            kinds.SETTING,
        ),
        ({"updated": "N"}, kinds.UPDATE),
        ({"skipped": "hook"}, kinds.SKIPPED),
    ],
    ids=str,
)
def test_each_field_has_its_kind(change: dict[str, Any], kind: str) -> None:
    divergence = found(change)
    assert (divergence.step, divergence.first.kind, divergence.last_equal) == (2, kind, 1)
    assert kind in kinds.KINDS and divergence.data()["kind"] == kind


def test_what_comes_first_in_a_step_is_the_cause_of_the_rest() -> None:
    fields = ["updated", "used", "gradients", "state", "buffers", "weights"]
    order = [kinds.UPDATE, kinds.CLIPPING, kinds.GRADIENT, kinds.STATE, kinds.BUFFERS, kinds.WEIGHTS]
    change: dict[str, Any] = {}
    for field, kind in zip(fields, order, strict=True):
        change[field] = "other"
        divergence = found(change)
        assert divergence.first.kind == kind
        assert [each.kind for each in divergence.later] == order[: order.index(kind)][::-1]


def test_a_mode_or_a_flag_is_the_cause_of_what_is_computed_then() -> None:
    flag = {"flags": "y", "values": {**PLAIN["values"], "flags": {"threads": "2"}}}
    assert found({**flag, "gradients": "G"}).first.kind == kinds.FLAG
    assert found({**flag, "gradients": "G"}).first.text == "threads is 1 in A and 2 in B"
    assert (
        found({**flag, "settings": "S", "values": {**flag["values"], "settings": {"x: lr": "1"}}}).first.kind
        == kinds.RATE
    )
    mode = {"modes": "n", "values": {**PLAIN["values"], "modes": {"in eval mode": "drop"}}}
    assert found({**mode, **in_batch(loss="3ff0000000000002")}).first.kind == kinds.MODE


def test_a_flag_without_an_effect_is_a_note_and_no_divergence() -> None:
    flag = {"flags": "y", "values": {**PLAIN["values"], "flags": {"threads": "2"}}}
    same = compare(digests({}, {}), digests(flag, flag))
    assert same.divergence is None and same.notes == ["threads is 1 in A and 2 in B; it has had no effect"]
    later = compare(digests({}, {}), digests(flag, {**flag, "gradients": "G"})).divergence
    assert later is not None and later.first.kind == kinds.GRADIENT
    assert later.notes == ["threads is 1 in A and 2 in B (since an earlier step)"]


def test_between_sparse_digests_only_an_interval_is_known() -> None:
    one = {(10, 9): {**PLAIN, "step": 10, "batch": 9}, (20, 19): {**PLAIN, "step": 20, "batch": 19}}
    carried = {**one, (20, 19): {**one[20, 19], "weights": "W", "gradients": "G"}}
    divergence = compare(one, carried).divergence
    assert divergence is not None and not divergence.is_exact and divergence.last_equal == 10
    # with equal weights, streams and optimizer state, nothing has differed before
    exact = compare(one, {**one, (20, 19): {**one[20, 19], "gradients": "G"}}).divergence
    assert exact is not None and exact.is_exact


def test_batches_of_other_steps_show_another_order() -> None:
    def batches(*names: str) -> dict[tuple[int, int], dict[str, Any]]:
        return digests(*[{"batches": [{"fetched": name}]} for name in names])

    order = compare(batches("x", "y", "z"), batches("x", "z", "y")).divergence
    assert order is not None and (order.step, order.first.kind) == (2, kinds.DATA_ORDER)
    contents = compare(batches("x", "y", "z"), batches("x", "Y", "z")).divergence
    assert contents is not None and (contents.step, contents.first.kind) == (2, kinds.BATCH)


def test_sample_ids_decide_between_order_and_contents() -> None:
    unknown = found(in_batch(fetched="h", samples=["n", "m"], sample_ids="4 7"))
    assert unknown.first.kind == kinds.BATCH  # one run does not have them
    one = digests(in_batch(sample_ids="1 2"))
    for ids, kind in (("1 2", kinds.BATCH), ("2 5", kinds.DATA_ORDER)):
        divergence = compare(
            one, digests(in_batch(fetched="h", samples=["n", "m"], sample_ids=ids))
        ).divergence
        assert divergence is not None and divergence.first.kind == kind


def test_a_run_that_skipped_an_update_has_a_step_twice() -> None:
    twice = {**digests({}, {}), (2, 2): {**PLAIN, "step": 2, "batch": 2}}
    divergence = compare(twice, digests({}, {})).divergence
    assert divergence is not None and (divergence.step, divergence.first.kind) == (2, kinds.SKIPPED)


def test_ranks_may_have_other_batches_and_streams() -> None:
    change = {**in_batch(fetched="h"), "random": {"start": {"python": "q"}}, "buffers": "B"}
    assert compare(digests({}), digests(change), kinds=kinds.BETWEEN_RANKS).divergence is None
    drifted = compare(digests({}), digests({**change, "updated": "N"}), kinds=kinds.BETWEEN_RANKS).divergence
    assert drifted is not None and drifted.first.kind == kinds.UPDATE
