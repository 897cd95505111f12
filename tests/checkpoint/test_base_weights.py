"""Checkpoints of trainable weights only: what they hold, the fingerprint of their base, and runs that resume from them."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Adapted, Net, batches, quiet
from torch import Tensor, nn

from hookline import (
    CheckpointError,
    Hook,
    HooklineError,
    Line,
    OptionError,
    Trainer,
    export_checkpoint,
    load_weights,
)
from hookline.checkpoint.base_weights import (
    CPU_ELEMENTS,
    BaseWeights,
    bit_sums,
    digest_weights,
    fingerprint,
    left_out_in,
)
from hookline.checkpoint.files import read, read_manifest, verify
from hookline.checkpoint.format import LeftOut
from hookline.cli import main
from hookline.distributed.comm import Ranks
from hookline.hooks import FreezeSchedule, ModelCheckpoint, WeightAveraging

TRAINABLE = {"weights": "trainable", "every": 3600.0}
HEAD = {"layer.weight", "layer.bias"}
STATISTICS = {"base.1.running_mean", "base.1.running_var", "base.1.num_batches_tracked"}
BASE = {f"base.{number}.{kind}" for number in range(3) for kind in ("weight", "bias")}
LAST = "run/checkpoints/last"


def train(module: nn.Module, epochs: int = 1, resume: Any = None, **options: Any) -> Trainer:
    """Train on four batches an epoch; the same run again if it is resumed."""
    given = {"run_dir": "run", "max_epochs": epochs, "checkpoint": TRAINABLE, "seed": 1, **options}
    trainer = quiet(**given)
    trainer.fit(module, batches(4), batches(2), resume=resume)
    return trainer


def held(path: Any = LAST) -> set[str]:
    """The names of the weights that are in a checkpoint."""
    return {name for name, each in read(path)["module"].items() if isinstance(each, Tensor)}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    own, others = one.state_dict(), other.state_dict()
    assert own.keys() == others.keys()
    assert [name for name in own if not torch.equal(own[name], others[name])] == []


def as_list(array: Any) -> Any:
    """A tensor or an array as JSON."""
    return array.tolist()


class StopAt(Hook):
    """Stops in the middle of an epoch."""

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 6:
            trainer.stop("cut")


# ---- what is in a checkpoint, and what a resume makes of it ----------------------------------------------------------


@pytest.mark.parametrize("write", ["sync", "async"])
def test_a_run_resumed_from_trainable_weights_ends_with_the_same_bits(tmp_path: Path, write: str) -> None:
    whole = Adapted()
    train(whole, 3, hooks=[WeightAveraging(decay=0.5)])
    options = {"checkpoint": {**TRAINABLE, "write": write}, "run_dir": "cut"}
    train(Adapted(), 3, hooks=[WeightAveraging(decay=0.5), StopAt()], **options)
    assert held("cut/checkpoints/last") == HEAD | STATISTICS
    resumed = Adapted()
    trainer = train(resumed, 3, "cut/checkpoints/last", hooks=[WeightAveraging(decay=0.5)], **options)
    assert_same(resumed, whole)
    assert resumed.losses == whole.losses[6:]
    one, other = (read(f"{name}/checkpoints/last") for name in ("run", "cut"))
    for name in ("hooks", "optimizers", "rng", "log", "counters"):
        assert json.dumps(one[name], default=as_list) == json.dumps(other[name], default=as_list)
    assert one["hooks"]["weight_averaging"]["averages"].keys() == HEAD
    assert trainer.hooks["weight_averaging"].averages.keys() == HEAD | BASE  # as in a run that was not cut


def test_a_base_that_is_large_takes_no_room_on_disk(tmp_path: Path) -> None:
    def make() -> Adapted:
        module = Adapted()
        module.base.append(nn.Linear(4, 50_000).requires_grad_(False)).append(nn.Linear(50_000, 4))
        module.base[4].requires_grad_(False)
        return module

    train(make(), hooks=[WeightAveraging()])
    train(make(), run_dir="all", checkpoint=True)
    small, large = (
        sum(each.stat().st_size for each in Path(name, "checkpoints/last").iterdir())
        for name in ("run", "all")
    )
    assert small < 30_000 < 1_600_000 < large


def test_what_was_trained_or_written_into_is_in_the_checkpoint_also_if_it_is_frozen_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Writes(Hook):
        def on_train_batch_start(self, module: Any, step: int) -> None:
            module.base[0].requires_grad_(step == 2)  # trains for one step between two saves
            if step == 3:
                module.base[2].bias.data.mul_(-1)  # which no version counter of torch sees

    whole, resumed = Adapted(), Adapted()
    train(whole, 3, hooks=[Writes()])
    train(Adapted(), 3, hooks=[Writes(), StopAt()], run_dir="cut")
    assert held("cut/checkpoints/last") == HEAD | STATISTICS | {"base.0.weight", "base.0.bias", "base.2.bias"}
    assert "3 parameters that are frozen now, because they were trained or changed after" in caplog.text
    assert "base.0.weight, base.0.bias, base.2.bias." in caplog.text
    train(resumed, 3, "cut/checkpoints/last", run_dir="cut")
    assert_same(resumed, whole)


def test_the_average_of_a_weight_that_a_resumed_run_begins_to_train_begins_with_the_base(
    tmp_path: Path,
) -> None:
    class Thaws(Hook):
        def on_train_batch_start(self, module: Any, step: int) -> None:
            module.base[2].requires_grad_(step >= 6)

    averages = [WeightAveraging(decay=0.5) for _ in range(3)]
    train(Adapted(), 3, hooks=[averages[0], Thaws()])
    train(Adapted(), 3, hooks=[averages[1], Thaws(), StopAt()], run_dir="cut")
    assert held("cut/checkpoints/last") == HEAD | STATISTICS
    train(Adapted(), 3, "cut/checkpoints/last", hooks=[averages[2], Thaws()], run_dir="cut")
    whole, _, resumed = (each.averages for each in averages)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_weights_that_a_schedule_will_train_are_in_every_checkpoint(tmp_path: Path) -> None:
    class Saves(Hook):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            trainer.save_checkpoint(f"run/checkpoints/{epoch}")

    def make() -> Adapted:
        module = Adapted()
        module.base[2].requires_grad_(True)
        return module

    hooks = lambda: [FreezeSchedule({"base.2.*": "1 epochs"}), Saves()]  # noqa: E731
    whole, resumed = make(), make()
    train(whole, 3, hooks=hooks())
    wanted = HEAD | STATISTICS | {"base.2.weight", "base.2.bias"}
    assert [held(f"run/checkpoints/{name}") for name in (0, 2, "last")] == [wanted] * 3
    train(resumed, 3, "run/checkpoints/0", hooks=hooks(), run_dir="again")
    assert_same(resumed, whole)


def test_a_model_without_frozen_weights_has_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    train(Net())
    manifest = read_manifest(LAST)
    assert "base" not in manifest and manifest["kind"] == "hookline checkpoint"


def test_names_of_a_state_dict_that_the_model_does_not_have_are_known_by_their_memory(tmp_path: Path) -> None:
    class Renamed(Adapted):
        def state_dict(self, *given: Any, **named: Any) -> Any:
            return OrderedDict((f"model/{name}", each) for name, each in super().state_dict().items())

        def load_state_dict(self, state: Any, *given: Any, **named: Any) -> Any:
            return super().load_state_dict(
                {name.removeprefix("model/"): each for name, each in state.items()}
            )

    whole, resumed = Renamed(), Renamed()
    train(Renamed(lr=0.0))
    assert held() == {f"model/{name}" for name in HEAD | STATISTICS}
    train(whole, 2)
    train(Renamed(), run_dir="cut")
    train(resumed, 2, "auto", run_dir="cut")
    assert_same(resumed, whole)


# ---- another base ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of trainable weights, which the tests only read."""
    folder = tmp_path_factory.mktemp("saved")
    train(Adapted(), run_dir=folder / "run", hooks=[ModelCheckpoint("val/loss", filename="best")])
    return folder / "run" / "checkpoints" / "last"


def both_fingerprints(path: Path, other: Adapted) -> str:
    before = fingerprint(left_out_in(read(path)["module"]))
    now = digest_weights({name: other.state_dict()[name] for name in BASE})
    assert before == read_manifest(path)["base"] and before != fingerprint(now)
    return f"the base model {before}, and Adapted was built on another base model, {fingerprint(now)}."


@pytest.mark.parametrize("setting", ["all", "trainable"])
def test_a_resume_refuses_another_base_before_the_first_step(
    tmp_path: Path, saved: Path, setting: str
) -> None:
    other = Adapted(seed=1)
    with pytest.raises(CheckpointError) as refused:
        train(other, 3, saved, checkpoint={"weights": setting})
    assert both_fingerprints(saved, Adapted(seed=1)) in str(refused.value)
    assert "6 of the 6 weights that are left out differ: base.0.weight, base.0.bias, " in str(refused.value)
    assert "Build the model as before: with the same pretrained weights" in str(refused.value)
    assert other.losses == [] and not Path(LAST).exists()


def test_everything_else_that_loads_weights_refuses_another_base(saved: Path) -> None:
    def on_line(module: Adapted) -> None:
        with Line(module, module.configure_optimizers(), run_dir=None) as line:
            line.load_checkpoint(saved)

    actions: dict[str, Any] = {
        "load_weights": lambda module: load_weights(module, saved),
        "validate": lambda module: quiet(run_dir="v").validate(module, batches(2), checkpoint=saved),
        "load_best": lambda module: quiet().load_best(module, path=saved),
        "line": on_line,
        "load_from_checkpoint": lambda module: Adapted.load_from_checkpoint(saved, seed=1),
    }
    text = both_fingerprints(saved, Adapted(seed=1))
    for name, act in actions.items():
        module = Adapted(seed=1)
        with pytest.raises(CheckpointError) as refused:
            act(module)
        assert text in str(refused.value), name
        assert_same(module, Adapted(seed=1))


def test_another_dtype_or_a_missing_weight_of_the_base_is_named(saved: Path) -> None:
    smaller: Any = Adapted()
    smaller.base = smaller.base[:2].to(torch.bfloat16)
    with pytest.raises(CheckpointError) as refused:
        load_weights(smaller, saved)
    assert "base.0.weight (float32 [32, 4] in the checkpoint's base, bfloat16 [32, 4] here)" in str(
        refused.value
    )
    assert "Adapted does not have 2 of them: base.2.weight, base.2.bias" in str(refused.value)


def test_trainable_weights_can_be_loaded_into_another_base_on_request(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Adapted(seed=1)
    report = load_weights(other, saved, strict=False)
    assert set(report.loaded) == HEAD | STATISTICS and set(report.missing) == BASE
    assert both_fingerprints(saved, Adapted(seed=1)) in caplog.text
    assert torch.equal(other.layer.weight, read(saved)["module"]["layer.weight"])


# ---- the same base ---------------------------------------------------------------------------------------------------


def test_everything_that_loads_weights_works_with_the_same_base(saved: Path, tmp_path: Path) -> None:
    wanted = Adapted()
    report = load_weights(wanted, saved)
    assert set(report.loaded) == HEAD | STATISTICS and report.complete
    assert f"5 of 11 weights loaded, the others are those of the base model {report.base}" in str(report)
    assert torch.equal(wanted.layer.weight, read(saved)["module"]["layer.weight"])
    assert not torch.equal(wanted.layer.weight, Adapted().layer.weight)
    assert_same(Adapted.load_from_checkpoint(saved), wanted)
    module = Adapted()
    measured = quiet(run_dir="v").validate(module, batches(2), checkpoint=saved)
    assert_same(module, wanted)
    assert measured["val/loss"] == read_manifest(saved)["metrics"]["val/loss"]
    module = Adapted()
    load_weights(module, {**read(saved)["module"]})  # the contents of a checkpoint are a mapping
    assert_same(module, wanted)
    options = {"module": Adapted(), "example": [torch.ones(2, 4)], "method": "predict_step"}
    done = export_checkpoint(saved, "net.pt2", **options)
    assert done.tensors == len(wanted.state_dict())  # a program has the weights of the base, too
    program = torch.export.load(done.path).state_dict
    assert torch.equal(program["module.base.0.weight"], wanted.base[0].weight)


def test_a_program_is_exported_with_the_weights_of_the_base(saved: Path, tmp_path: Path) -> None:
    class Predictor(Adapted):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(self.base(inputs))  # type: ignore[no-any-return]

    example = torch.randn(2, 4)
    done = export_checkpoint(saved, tmp_path / "net.pt2", module=Predictor(), example=example)
    assert done.tensors == len(Predictor().state_dict())
    expected = Predictor.load_from_checkpoint(saved).eval()(example)
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(example), expected)


def test_a_base_that_the_run_converted_is_loaded_into_a_model_that_was_not(tmp_path: Path) -> None:
    trained = Adapted()
    train(trained, precision="bf16-true")
    loaded = Adapted.load_from_checkpoint(LAST)
    assert loaded.base[0].weight.dtype == torch.float32
    assert_same(loaded, trained.float())
    with pytest.raises(CheckpointError, match="another base model"):
        load_weights(Adapted(seed=1), LAST)


def test_names_of_the_base_are_renamed_with_the_others(saved: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Adapted()

    module = Wrapped()
    assert load_weights(module, saved, rename={"": "inner."}).complete
    assert_same(module.inner, Adapted.load_from_checkpoint(saved))


def test_restore_best_puts_the_best_trainable_weights_into_the_module(tmp_path: Path) -> None:
    best = ModelCheckpoint("val/loss", restore_best=True, weights="trainable")
    module = Adapted(lr=3.0)  # diverges, so the first epoch is the best
    trainer = train(module, 3, hooks=[best], checkpoint=True)
    assert held(best.best_model_path) == HEAD | STATISTICS and held() == HEAD | STATISTICS | BASE
    assert_same(module, Adapted.load_from_checkpoint(best.best_model_path))
    assert trainer.validate(module, batches(2))["val/loss"] == pytest.approx(best.best_model_score)


def test_an_evaluation_uses_the_average_of_the_trainable_weights(tmp_path: Path) -> None:
    average = WeightAveraging(decay=0.5)
    trainer = train(Adapted(), 2, hooks=[average])
    score = trainer.metrics["val/loss"]
    for hooks in ([WeightAveraging(decay=0.5)], []):
        module = Adapted()
        found = quiet(run_dir="v", hooks=hooks).validate(module, batches(2), checkpoint=LAST)
        assert found["val/loss"] == score
        assert all(torch.equal(module.state_dict()[name], Adapted().state_dict()[name]) for name in BASE)


# ---- mixed with checkpoints of all weights ------------------------------------------------------------------------------


def test_a_run_may_change_between_all_weights_and_trainable_ones(tmp_path: Path) -> None:
    whole = Adapted()
    train(whole, 3, checkpoint={"last": False})
    train(Adapted(), 1, checkpoint=True)
    assert held() == HEAD | STATISTICS | BASE
    train(Adapted(), 2, "auto")
    assert held() == HEAD | STATISTICS
    resumed = Adapted()
    train(resumed, 3, "auto", checkpoint=True)
    assert held() == HEAD | STATISTICS | BASE
    assert_same(resumed, whole)


def test_a_resumed_run_may_train_more_of_the_base(tmp_path: Path) -> None:
    train(Adapted(), 1)
    for seed, refused in ((0, False), (1, True)):
        module = Adapted(seed=seed)
        module.base[2].requires_grad_(True)
        with pytest.raises(CheckpointError, match="differ: base.0") if refused else contextlib.nullcontext():
            train(module, 2, "auto")
    assert held() == HEAD | STATISTICS | {"base.2.weight", "base.2.bias"}


def test_a_base_that_only_a_full_checkpoint_has_stays_in_the_checkpoints(tmp_path: Path) -> None:
    whole, resumed = Adapted(), Adapted(seed=2)
    train(whole, 3, checkpoint={"last": False})
    train(Adapted(), 1, checkpoint=True)
    train(Adapted(seed=1), 2, "auto")  # built on another base, which the full checkpoint replaces
    assert held() == HEAD | STATISTICS | BASE
    train(resumed, 3, "auto")
    assert_same(resumed, whole)


# ---- where it can be asked for -------------------------------------------------------------------------------------------


def test_the_trainers_setting_is_that_of_hooks_and_requests_that_say_nothing_else(tmp_path: Path) -> None:
    class Asks(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.save_checkpoint("run/checkpoints/plain")
            trainer.save_checkpoint("run/checkpoints/all", weights="all")

    train(
        Adapted(),
        hooks=[Asks(), ModelCheckpoint(filename="own"), ModelCheckpoint(filename="full", weights="all")],
    )
    small = {each.name for each in Path("run/checkpoints").iterdir() if "base" in read_manifest(each)}
    assert small == {"plain", "own", "last"}
    assert {each.name for each in Path("run/checkpoints").iterdir()} == small | {"all", "full"}


def test_a_request_that_the_run_is_not_prepared_for_is_refused(tmp_path: Path) -> None:
    class Asks(Hook):
        def on_train_start(self, trainer: Any) -> None:
            trainer.save_checkpoint(weights="trainable")

    with pytest.raises(OptionError, match=r"add ModelCheckpoint\(weights='trainable'\) before fit"):
        train(Adapted(), hooks=[Asks()], checkpoint=True)
    trainer = train(Adapted(), checkpoint=True)
    with pytest.raises(OptionError, match="which this run did not compute when it began"):
        trainer.save_checkpoint("x", weights="trainable")
    with pytest.raises(OptionError, match="weights='trainabel', allowed: 'all', 'trainable'.*Did you mean"):
        trainer.save_checkpoint("x", weights="trainabel")
    with pytest.raises(OptionError, match="weights"):
        quiet(checkpoint={"weights": "frozen"})


def test_loops_of_other_trainers_refuse_it(tmp_path: Path) -> None:
    module = Adapted()
    with (
        pytest.raises(HooklineError, match="weights='trainable' works in a fit of hookline.Trainer"),
        Line(
            module, module.configure_optimizers(), hooks=[ModelCheckpoint(weights="trainable")], run_dir="r"
        ),
    ):
        pass
    with (
        Line(module, module.configure_optimizers(), run_dir="r") as line,
        pytest.raises(OptionError, match="weights='trainable' works in a fit"),
    ):
        line.save_checkpoint(weights="trainable")


def test_checkpoints_at_a_url_are_written_read_and_described(
    tmp_path: Path, memory_urls: None, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "memory://trainable"
    best = ModelCheckpoint(dirpath=url, filename="best", weights="trainable")
    whole, resumed = Adapted(), Adapted()
    train(whole, 2, hooks=[best], checkpoint={"last": False})
    assert held(f"{url}/best") == HEAD | STATISTICS
    load_weights(resumed, f"{url}/best")
    assert_same(resumed, whole)
    with pytest.raises(CheckpointError, match="holds only the trainable weights of the base model"):
        load_weights(Adapted(seed=1), f"{url}/best")
    capsys.readouterr()
    assert main(["checkpoint", "show", f"{url}/best"]) == 0
    assert f"{read_manifest(f'{url}/best')['base']}: 6 of its weights are left out" in capsys.readouterr().out


# ---- the command line -----------------------------------------------------------------------------------------------------


def test_the_command_line_shows_the_base_and_does_not_export_a_part(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = read_manifest(saved)["base"]
    assert main(["checkpoint", "show", str(saved)]) == 0
    assert f"base model  {base}: 6 of its weights are left out" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(saved), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["base"], shown["left_out"], shown["tensors"]) == (base, 6, 5)
    assert main(["checkpoint", "show", str(saved.parent.parent)]) == 0
    assert "whole, trainable weights only" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(saved)]) == 0
    verify(saved)
    assert main(["checkpoint", "export", str(saved), "out.safetensors"]) == 1
    assert f"holds only the trainable weights of the base model {base}; 6 weights" in capsys.readouterr().err
    assert not Path("out.safetensors").exists()
    assert main(["runs", str(saved.parent.parent.parent)]) == 0


def test_a_version_that_would_miss_the_base_refuses_the_kind_of_the_checkpoint(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["format"], manifest["kind"]) == (2, "hookline checkpoint of trainable weights")


# ---- hashes and sums ------------------------------------------------------------------------------------------------------

KINDS = [
    torch.randn(6, 5),
    torch.randn(6, 5, dtype=torch.float64),
    torch.randn(6, 5).to(torch.bfloat16),
    torch.randn(6, 5).to(torch.float8_e5m2),
    torch.randn(6, 5, dtype=torch.complex64),
    torch.randn(6, 5, dtype=torch.complex64).conj(),
    torch.arange(30).reshape(6, 5),
    torch.arange(30).reshape(6, 5) % 2 == 0,
    torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    torch.tensor(3.0),
]


@pytest.mark.parametrize("tensor", KINDS, ids=lambda each: f"{each.dtype}{list(each.shape)}")
def test_a_digest_depends_on_values_dtype_and_shape_and_not_on_the_memory(tensor: Tensor) -> None:
    digest = digest_weights({"w": tensor})["w"]
    assert (digest.dtype, digest.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    twice = torch.stack([tensor, tensor], dim=-1)
    assert digest_weights({"w": twice[..., 1]})["w"] == digest  # strided
    assert digest_weights({"w": tensor.contiguous()})["w"] == digest
    changed = tensor.clone()
    bytes_ = changed.resolve_conj().contiguous().view(-1).view(torch.uint8)
    bytes_[-1] ^= 1  # one bit
    changed = bytes_.view(tensor.dtype).view(tensor.shape)
    assert digest_weights({"w": changed})["w"].sha256 != digest.sha256
    assert bit_sums({"w": changed}) != bit_sums({"w": tensor})
    assert bit_sums({"w": tensor.clone()}) == bit_sums({"w": tensor})


def test_a_fingerprint_depends_on_names_and_not_on_their_order() -> None:
    weights = {"a": LeftOut("float32", (2,), "00"), "b": LeftOut("float32", (2,), "11")}
    assert fingerprint(dict(reversed(weights.items()))) == fingerprint(weights)
    assert fingerprint({"a": weights["b"], "b": weights["a"]}) != fingerprint(weights)
    assert fingerprint({}) == ""


def test_what_is_not_a_plain_tensor_has_no_digest_and_is_always_held() -> None:
    weights = {"sparse": torch.eye(2).to_sparse(), "meta": torch.empty(2, device="meta"), "text": "x"}
    assert digest_weights(weights) == {}
    assert digest_weights({"empty": torch.empty(0, 3)})["empty"].shape == (0, 3)


def test_two_values_that_change_places_change_the_sum() -> None:
    values = torch.arange(2.0 * CPU_ELEMENTS + 3)
    before = bit_sums({"w": values})
    for one, other in ((0, 1), (5, CPU_ELEMENTS + 5), (CPU_ELEMENTS - 1, 2 * CPU_ELEMENTS)):
        swapped = values.clone()
        swapped[[one, other]] = swapped[[other, one]]
        assert bit_sums({"w": swapped}) != before


@pytest.mark.parametrize(
    "values",
    [([0, 3, 0], [1, 1, 1]), ([1.0, -2.0, -3.0, 4.0], [-1.0, 2.0, 3.0, -4.0])],
    ids=["counts", "signs"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_regular_changes_of_several_values_change_the_sum(values: Any, dtype: torch.dtype) -> None:
    before, after = (torch.tensor(each, dtype=dtype) for each in values)
    assert bit_sums({"w": before}) != bit_sums({"w": after})


def test_a_weight_that_is_moved_or_rewritten_with_its_own_values_has_not_changed() -> None:
    module = Adapted()
    base = BaseWeights(module, Ranks())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.clone())
            parameter.data = parameter.data.clone()
    assert left_out_in(base.leave_out(module.state_dict(), module, Ranks())).keys() == BASE | STATISTICS
    module.to(torch.float64)
    base.begin(module.state_dict())
    assert left_out_in(base.leave_out(module.state_dict(), module, Ranks())).keys() == BASE | STATISTICS
    module.base[0].bias.data[3] += 1e-12
    module.base[1].running_mean += 1
    left_out = left_out_in(base.leave_out(module.state_dict(), module, Ranks())).keys()
    assert left_out == (BASE | STATISTICS) - {"base.0.bias", "base.1.running_mean"}
