"""ModelSummary: the table of a model, and what is measured while the first batch runs."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks.torchrun import torchrun
from test_budgets import per_step, with_hooks
from tiny import Net, batches, quiet
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hookline import SKIP_BATCH, Hook, Signal
from hookline.hooks import ModelSummary
from hookline.hooks.model_summary import compact, shapes_in, summarize
from hookline.util.errors import HookError, OptionError


class Deep(Net):
    """Frozen, shared, half precision, buffers, eval mode, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.base[0].weight.requires_grad_(False)
        self.base[1].eval()
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.base[0].weight
        self.half = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.base(batch[0]) * self.scale + self.tied(batch[0]).sum(1, keepdim=True)
        return super().training_step((hidden, batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.1)


TABLE = """\
layer            class       parameters  trainable   size   mode
(module itself)  Deep                 4          4   16 B  train
layer            Linear              10         10   40 B  train
base             Sequential          92         60  440 B  train
tied             Linear              40          8  160 B  train
half             Linear              16         16   32 B  train

parameters  130: 98 trainable, 32 frozen
size        560 B: float32 520 B, bfloat16 32 B, int64 8 B; buffers 72 B
modules     8 in train mode, 1 in eval mode
shared      base.0.weight = tied.weight"""


def test_the_table_of_a_model() -> None:
    """The shared weight is in both of its layers, and once in the totals."""
    assert str(ModelSummary().of(Deep())) == TABLE


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["(module itself)", "layer", "base", "tied", "half"]),
        (-1, ["(module itself)", "layer", "base", "base.0", "base.1", "base.2", "base.3", "tied", "half"]),
    ],
    ids=str,
)
def test_depth_chooses_the_layers_and_not_the_totals(depth: int, names: list[str]) -> None:
    made = ModelSummary(depth=depth).of(Deep())
    assert [row.name for row in made.rows] == names
    assert made.parameters == 130 and str(made).endswith(TABLE.partition("\n\n")[2])
    modes = {row.name: row.mode for row in made.rows}
    assert modes.get("base.1", "eval") == "eval"


def test_lazy_layers_are_counted_once_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    before = summarize(model, -1)
    assert (before.parameters, before.lazy, before.rows[0].lazy) == (0, 4, 2)
    assert "0 + ?" in str(before) and "4 parameters without a shape" in str(before)
    model(torch.randn(2, 5))
    after = summarize(model, -1)
    assert (after.parameters, after.lazy) == (5 * 3 + 3 + 6, 0)


def test_a_model_without_anything() -> None:
    assert str(ModelSummary(depth=-1).of(nn.Identity())) == (
        "parameters  0: 0 trainable, 0 frozen\nsize        0 B\nmodules     1 in train mode, 0 in eval mode"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (1_234_567, "1.23 M"), (7 * 10**9, "7 G"), (10**16, "1e+04 T")],
)
def test_numbers_are_short(number: int, text: str) -> None:
    assert compact(number) == text


def test_shapes_of_nested_values() -> None:
    assert shapes_in([torch.ones(2, 3), {"a": (torch.ones(4), None)}, torch.tensor(1.0)]) == "2x3, 4, scalar"


# ---- in a run ----------------------------------------------------------------------------------------------


def test_it_is_printed_before_the_first_step_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Looks(Hook):
        def on_train_batch_start(self, batch_idx: int) -> None:
            if batch_idx == 0:
                print(f"first batch after: {capsys.readouterr().err}")

    hook = ModelSummary()
    quiet(hooks=[hook, Looks()], logger=True, run_dir=tmp_path).fit(Deep(), batches(2))
    said = capsys.readouterr()
    assert TABLE in said.out and said.err == ""
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row.get("type") == "model"]
    assert (event["parameters"], event["trainable"], event["sizes"]["bfloat16"]) == (130, 98, 32)


def test_on_a_terminal_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    quiet(hooks=[ModelSummary()]).fit(Deep(), batches(1))
    text = screen.getvalue()
    assert "┃" in text and "Sequential" in text and "98 trainable" in text


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_measuring_the_first_batch_changes_no_bit_of_the_training(accumulate: int) -> None:
    found = []
    for hooks in ([], [ModelSummary(depth=-1, flops=True, shapes=True)]):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        module = Deep()
        module.base[1].train()
        after_first: list[Any] = []

        class Keeps(Hook):
            def on_train_batch_end(self, module: nn.Module, after: Any = after_first) -> None:
                grads = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
                after.append((grads, [each.training for each in module.modules()], states()))

        trainer = quiet(hooks=[*hooks, Keeps()], accumulate_grad_batches=accumulate)
        trainer.fit(module, batches(5))
        found.append((module.state_dict(), after_first, trainer.metrics["train/loss"]))
    (plain, steps, loss), (measured, other_steps, other_loss) = found
    assert loss == other_loss
    assert all(
        torch.equal(plain[name], measured[name]) for name in plain
    )  # with the statistics of the batch norm
    for (grads, modes, random_states), (others, other_modes, other_states) in zip(
        steps, other_steps, strict=True
    ):
        assert modes == other_modes and random_states == other_states
        for one, other in zip(grads, others, strict=True):
            assert (one is None) is (other is None) and (one is None or torch.equal(one, other))


class TwoLayers(Net):
    """4 -> 8 -> 2, with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_flops_and_shapes_of_the_first_batch(capsys: pytest.CaptureFixture[str]) -> None:
    hook = ModelSummary(depth=2, flops=True, shapes=True)
    quiet(hooks=[hook]).fit(TwoLayers(), batches(3, size=5))
    made = hook.summary
    assert made is not None
    first, second = 2 * 5 * 4 * 8, 2 * 5 * 8 * 2
    assert made.flops_forward == first + second
    assert made.flops_backward == first + 2 * second  # no gradient of the input
    assert {row.name: row.flops for row in made.rows} == {
        "layer": first + second,
        "layer.0": first,
        "layer.1": 0,
        "layer.2": second,
    }
    assert {row.name: (row.inputs, row.outputs) for row in made.rows} == {
        "layer": ("5x4", "5x2"),
        "layer.0": ("5x4", "5x8"),
        "layer.1": ("5x8", "5x8"),
        "layer.2": ("5x8", "5x2"),
    }
    said = capsys.readouterr().err
    assert said.count("layer.2") == 1
    assert said.endswith("FLOPs       forward 480, backward 640; batch: float32[5, 4], float32[5, 2]\n")


@pytest.mark.parametrize("wanted", [{"flops": True}, {"shapes": True}], ids=str)
def test_either_can_be_asked_for_alone(wanted: dict[str, bool]) -> None:
    hook = ModelSummary(**wanted)  # type: ignore[arg-type]
    quiet(hooks=[hook]).fit(TwoLayers(), batches(1))
    assert hook.summary is not None
    (row,) = hook.summary.rows
    assert (row.flops is not None, bool(row.inputs)) == ("flops" in wanted, "shapes" in wanted)
    assert (hook.summary.flops_forward is not None) == ("flops" in wanted)


def test_repeated_forwards_of_activation_checkpointing_belong_to_the_backward() -> None:
    def flops(**options: Any) -> tuple[Any, ...]:
        hook = ModelSummary(depth=2, flops=True)
        quiet(hooks=[hook], **options).fit(TwoLayers(), batches(1))
        assert hook.summary is not None
        return (
            hook.summary.flops_forward,
            hook.summary.flops_backward,
            [row.flops for row in hook.summary.rows],
        )

    plain, repeated = flops(), flops(activation_checkpointing=["Sequential"])
    # torch repeats a segment up to the last tensor that its backward needs, so not the last layer
    assert repeated == (plain[0], plain[1] + plain[2][1], plain[2])


def test_what_an_optimizer_multiplies_is_not_counted() -> None:
    class Multiplies(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.ones(30, 30) @ torch.ones(30, 30)
            return super().step(closure)

    class Own(TwoLayers):
        def configure_optimizers(self) -> Any:
            return Multiplies(self.parameters(), lr=0.1)

    hook = ModelSummary(flops=True)
    quiet(hooks=[hook]).fit(Own(), batches(1, size=5))
    assert hook.summary is not None
    assert (hook.summary.flops_forward, hook.summary.flops_backward) == (480, 640)


def test_a_skipped_batch_is_not_measured() -> None:
    class Skips(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Signal | None:
            return SKIP_BATCH if batch_idx < 2 else None

    hook = ModelSummary(flops=True)
    quiet(hooks=[hook, Skips()]).fit(TwoLayers(), [*batches(2, size=9), *batches(2, size=5)])
    assert hook.summary is not None and hook.summary.flops_forward == 480
    assert _get_current_dispatch_mode() is None


def left_behind(module: nn.Module) -> bool:
    hooks = [(each._forward_hooks, each._forward_pre_hooks) for each in module.modules()]
    return any(one or two for one, two in hooks) or _get_current_dispatch_mode() is not None


def test_after_the_first_batch_nothing_is_left() -> None:
    class Looks(Hook):
        found: list[bool]

        def on_train_start(self) -> None:
            self.found = []

        def on_step_end(self, module: nn.Module) -> None:
            self.found.append(left_behind(module))

    looks = Looks()
    trainer = quiet(hooks=[ModelSummary(flops=True, shapes=True), looks])
    for _ in range(2):  # a second fit measures again
        trainer.fit(TwoLayers(), batches(3))
        assert looks.found == 3 * [False]
        assert trainer.hooks.list_hooks() == ["model_summary", "looks"]


def test_a_failing_first_batch_leaves_nothing() -> None:
    class Fails(TwoLayers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            raise ValueError("no")

    module, trainer = Fails(), quiet(hooks=[ModelSummary(flops=True, shapes=True)])
    with pytest.raises(ValueError, match="no"):
        trainer.fit(module, batches(1))
    assert not left_behind(module)
    assert trainer.hooks.list_hooks() == ["model_summary"]
    trainer.fit(TwoLayers(), batches(1))  # and the next run is not disturbed
    assert not left_behind(module)


def test_steps_cost_nothing() -> None:
    for made in (lambda: ModelSummary(), lambda: ModelSummary(flops=True, shapes=True)):
        counted = per_step(lambda data, made=made: with_hooks(made())(data))
        # counted anew: once torch has imported its compiler, it takes more calls for a step
        assert counted == per_step(with_hooks())


def test_a_compiled_model_cannot_be_measured() -> None:
    with pytest.raises(HookError, match="compiled model"):
        quiet(hooks=[ModelSummary(flops=True)], compile={"backend": "eager"}).fit(Net(), batches(1))
    inside = TwoLayers()
    inside.layer.compile(backend="eager")
    with pytest.raises(HookError, match="compiled model"):
        quiet(hooks=[ModelSummary(shapes=True)]).fit(inside, batches(1))
    quiet(hooks=[ModelSummary()]).fit(inside, batches(1))


@pytest.mark.parametrize("wrong", [{"depth": -2}, {"depth": "all"}, {"flops": 1}, {"shapes": None}], ids=str)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"ModelSummary: {next(iter(wrong))}="):
        ModelSummary(**wrong)


TWO_RANKS = """
    from hookline import Trainer
    from hookline.hooks import ModelSummary
    from hooks.test_model_summary import TwoLayers
    from tiny import batches

    hook = ModelSummary(depth=2, flops=True, shapes=True)
    trainer = Trainer(strategy="fsdp", device="cpu", hooks=[hook], max_epochs=1, enable_progress_bar=False, logger=False,
                      checkpoint=False)
    trainer.fit(TwoLayers(), batches(4, size=5))
    made = hook.summary
    print("MADE", made.parameters, made.trainable, sum(made.sizes.values()), made.local_size, made.flops_forward,
          [row.parameters for row in made.rows])
"""


def test_a_sharded_model_has_its_full_sizes_and_rank_zero_prints(tmp_path: Path) -> None:
    done = torchrun(TWO_RANKS, tmp_path)
    whole = 4 * 8 + 8 + 8 * 2 + 2
    assert done.lines("MADE") == 2 * [f"{whole} {whole} {4 * whole} {2 * whole} 480 [58, 40, 0, 18]"], (
        done.output
    )
    assert done.output.count("FLOPs forward") == 1
