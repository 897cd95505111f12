"""100 planted divergences: the right step for all of them, the right kind for at least 95."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diverge.planted import PLANTS, STEPS, Plant, Setup, found, samples
from thorough import some
from torch.utils.data import DataLoader, TensorDataset

from hookline.digests.compare import BATCH, DATA_ORDER, KINDS, METRIC
from hookline.digests.diverge import diverge

FIRST = [*{(each.kind, each.name[3:].partition(" at ")[0]): each for each in reversed(PLANTS)}.values()]
"""One of each change and kind."""


def test_the_step_is_always_found_and_the_kind_nearly_always(tmp_path: Path) -> None:
    wrong_step, wrong_kind, tried = [], [], some(FIRST, [each for each in PLANTS if each not in FIRST])
    for plant in tried:
        divergence = found(plant, tmp_path).divergence
        if divergence is None or divergence.step != plant.step or not divergence.is_exact:
            wrong_step.append((plant.name, divergence))
        elif divergence.first.kind != plant.kind or plant.names not in str(divergence.first):
            wrong_kind.append((plant.name, plant.kind, divergence.first))
    assert wrong_step == []
    assert len(wrong_kind) <= len(tried) // 20, wrong_kind


def test_there_are_plants_of_every_kind_and_step() -> None:
    assert len(PLANTS) == len({plant.name for plant in PLANTS}) == 100
    assert {plant.kind for plant in PLANTS} == set(KINDS) - {METRIC}
    assert {plant.step for plant in PLANTS} == set(range(1, STEPS + 1))
    assert {plant.kind for plant in FIRST} == set(KINDS) - {METRIC} and len(FIRST) >= 40


def test_with_sparse_digests_the_interval_contains_the_step(tmp_path: Path) -> None:
    """Digests of steps 1, 3 and 6: what is carried from step to step is seen at the next digest."""
    sparse = {"digest": "every 3 steps"}
    for plant in [each for each in PLANTS if not each.base][::6]:
        divergence = found(
            Plant(plant.name, plant.kind, plant.step, plant.change, sparse), tmp_path
        ).divergence
        if divergence is None:  # a change without an effect on later steps, such as a mode that is reset
            assert plant.step not in (1, 3, 6), plant.name
            continue
        low = (divergence.last_equal or 0) + 1
        assert (divergence.step if divergence.is_exact else low) <= plant.step <= divergence.step, plant.name


@pytest.mark.parametrize(("change", "kind"), [("order", DATA_ORDER), ("contents", BATCH)])
def test_a_loader_with_another_order_is_told_from_one_with_other_contents(change: str, kind: str) -> None:
    """Also with batches that have no digests of single samples: the loader knows which samples they are."""
    for folder in ("one", "other"):
        is_changed = folder == "other"
        inputs, targets = (torch.cat(each) for each in zip(*samples(60), strict=True))
        if is_changed and change == "contents":
            inputs = inputs.clone() + 1e-3
        generator = torch.Generator().manual_seed(8 if is_changed and change == "order" else 7)
        data = TensorDataset(inputs, targets)
        Setup(data=DataLoader(data, batch_size=80, shuffle=True, generator=generator)).run(Path(folder))
    divergence = diverge("one", "other").divergence
    assert divergence is not None and (divergence.step, divergence.first.kind) == (1, kind), divergence
