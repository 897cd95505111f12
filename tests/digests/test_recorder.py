"""What a digest has: one read of the device, the moments around hooks, windows, skips, modules and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diverge.planted import AtBatchStart, AtStepEnd, BeforeUpdate, Net, Skips, nudge, samples, scale_gradient
from tiny import Net as Plain
from tiny import batches, quiet

from hookline import Hook, diverge, read_digests

EVERY: dict[str, Any] = {"digest": {"every": 1, "modules": True}}


def records(folder: str = "run", data: Any = None, net: Any = None, **options: Any) -> list[dict[str, Any]]:
    torch.manual_seed(3)
    given = {"seed": 1, **EVERY, **options}
    quiet(run_dir=folder, **given).fit(net or Net(), samples() if data is None else data)
    return list(read_digests(folder).current.values())


def test_a_digest_has_all_parts_of_a_step_by_name() -> None:
    first, second, *_ = records()
    assert (first["step"], first["batch"], first["epoch"]) == (1, 0, 0)
    assert {"weights", "buffers", "gradients", "used", "updated", "settings", "modes", "flags"} <= set(first)
    assert "state" not in first and "state" in second  # the optimizer has none before its first step
    assert [name for name, _ in first["batches"][0]["modules"]] == ["first", "norm", "drop", "last"]
    assert set(first["single"]["gradients"]) == {name for name, _ in Net().named_parameters()}
    assert len(first["batches"][0]["samples"]) == 4
    assert first["single"]["updated"] == second["single"]["weights"]  # nothing changed them in between
    assert set(first["random"]["start"]) == {"python", "numpy", "torch"}
    assert first["random"]["forward"] == {} and list(first["random"]["loss"]) == ["torch"]  # dropout


def test_without_details_a_digest_is_small() -> None:
    records(digest=True)
    lines = Path("run/digests.jsonl").read_text().splitlines()
    assert "single" not in lines[-1] and "modules" not in lines[-1] and len(lines[-1]) < 900


def test_a_digest_reads_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device every read raises; there is nothing to read there, and no digest may try to."""
    trainer = quiet(device="meta", run_dir="run", nonfinite="stop", **EVERY)
    trainer.fit(Plain(), batches(3))
    assert [step for step, _ in read_digests("run").current] == [1, 2, 3]
    reads: list[int] = []
    usual = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or usual(self))
    quiet(run_dir="other", digest=2).fit(Plain(), batches(6))
    assert len(reads) == len(read_digests("other").current) == 4


def test_digests_change_nothing_in_a_run() -> None:
    nets = []
    for digest in (False, {"every": 1, "modules": True}):
        torch.manual_seed(3)
        nets.append(Net())
        quiet(run_dir=f"run-{bool(digest)}", seed=1, digest=digest).fit(nets[-1], samples())
    for one, other in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert all(not each._forward_hooks for each in nets[1].modules())


@pytest.mark.parametrize(
    ("hook", "unchanged", "changed"),
    [
        (AtBatchStart(3, lambda s: s.batch[0].add_(1)), "fetched", "batch"),
        (BeforeUpdate(3, scale_gradient("last.bias")), "gradients", "used"),
        (AtBatchStart(3, nudge("last.bias")), "buffers", "weights"),
    ],
    ids=["batch", "gradients", "weights"],
)
def test_what_a_hook_changes_lies_between_two_digests(hook: Any, unchanged: str, changed: str) -> None:
    data = samples()
    one, other = (
        records("a", data=[tuple(part.clone() for part in each) for each in data])[2],
        records("b", data=data, hooks=[hook])[2],
    )
    if unchanged == "fetched":
        one, other = one["batches"][0], other["batches"][0]
        assert "batch" not in one and other["batch"] != other["fetched"] == one["fetched"]
    else:
        assert one[unchanged] == other[unchanged] and one[changed] != other[changed]


def test_the_weights_after_the_update_are_read_before_the_hooks_of_the_step_end() -> None:
    plain, changed = records("a"), records("b", hooks=[AtStepEnd(3, nudge("last.bias"))])
    assert plain[1]["updated"] == changed[1]["updated"] and plain[2]["weights"] != changed[2]["weights"]


def test_a_window_has_all_its_batches_and_the_gradients_of_the_last() -> None:
    found = records(data=samples(5), accumulate_grad_batches=2)
    assert [len(each["batches"]) for each in found] == [2, 2, 1]
    assert [each["batch"] for each in found] == [0, 2, 4]
    assert all({"gradients", "used", "updated"} <= set(each) for each in found)


def test_a_skipped_update_is_recorded_and_the_step_comes_again() -> None:
    class SkipsOnce(Skips):
        done = False

        def on_before_optimizer_step(self, state: Any) -> Any:
            self.done, was_done = self.done or state.step == 1, self.done
            return None if was_done else super().on_before_optimizer_step(state)

    records(hooks=[SkipsOnce(2, lambda s: None)])
    keys = list(read_digests("run").current)
    assert keys[:4] == [(1, 0), (2, 1), (2, 2), (3, 3)]
    assert read_digests("run").current[2, 1]["skipped"] == "hook"


def test_a_validation_inside_a_window_is_not_a_batch_of_it() -> None:
    class Validates(Hook):
        def on_train_batch_end(self, trainer: Any) -> None:
            trainer.validate()

    torch.manual_seed(0)
    quiet(run_dir="run", accumulate_grad_batches=2, hooks=[Validates()], **EVERY).fit(
        Plain(), batches(4), batches(2)
    )
    assert [len(each["batches"]) for each in read_digests("run").current.values()] == [2, 2]


def test_a_hook_that_is_added_in_a_digested_step_does_not_end_the_digest() -> None:
    class Adds(Hook):
        def on_before_backward(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.add_hook(BeforeUpdate(99, lambda s: None))

    found = records(hooks=[Adds()])
    assert [each["step"] for each in found] == [1, 2, 3, 4, 5, 6] and all("used" in each for each in found)


def test_a_batch_of_text_and_objects_is_digested() -> None:
    class Words(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["x"], batch_idx)

    data = [{"x": each, "words": ["a", str(number)]} for number, each in enumerate(batches(2))]
    first, second = records(data=data, net=Words())
    assert (
        first["batches"][0]["fetched parts"]["batch['words'][1]"]
        != second["batches"][0]["fetched parts"]["batch['words'][1]"]
    )


def test_a_batch_that_begins_with_a_single_number_has_samples_and_arrays_have_a_shape() -> None:
    class Scaled(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["x"], batch_idx)

    def made(shape: tuple[int, int]) -> list[Any]:
        return [
            {"scale": torch.tensor(2.0), "x": each, "grid": np.arange(6).reshape(shape)}
            for each in batches(1)
        ]

    one, other = (
        records(folder, data=made(shape), net=Scaled())[0]["batches"][0]
        for folder, shape in (("a", (2, 3)), ("b", (3, 2)))
    )
    assert len(one["samples"]) == len(batches(1)[0][0])
    parts = [each["fetched parts"] for each in (one, other)]
    assert [name for name in parts[0] if parts[0][name] != parts[1][name]] == ["batch['grid']"]
    divergence = diverge("a", "b").divergence
    assert divergence is not None and divergence.first.kind == "batch"  # the samples have the same order
