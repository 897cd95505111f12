"""What determines an order, as plain data: few entries, and equal after a round trip through JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks.sample_cases import plan, run

from hookline.run.sample_order import SampleOrder, read_order
from hookline.run.update_windows import UpdateWindows
from hookline.util.errors import UnknownSamples


def test_the_order_of_a_regular_run_is_small_and_plain(tmp_path: Path) -> None:
    chosen = {**plan(1), "names": ["data0"], "skips": False, "stops": False, "excludes": False}
    seen, _, trainer = run(chosen, tmp_path)
    text = (tmp_path / "run.json").read_text()
    order = json.loads(text)["order"]
    assert len(order["stretches"]) == len(order["layouts"]) == len(order["samplers"]) == 1
    assert len(json.dumps(order)) < 2000
    again = read_order(order)
    assert {**again.state_dict(), "reached": [2, 6]} == order
    assert again.samples(2) == trainer.samples(2)


def test_steps_before_the_record_are_unknown() -> None:
    order = SampleOrder(UpdateWindows())
    with pytest.raises(UnknownSamples, match="No update is known, not for step 4"):
        order.samples(4)
    order.windows.begin_epoch(9, 1, 0, 5, 1)
    with pytest.raises(UnknownSamples, match="The order is known from step 10 on, not for step 4"):
        order.samples(4)
