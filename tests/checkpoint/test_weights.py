"""A warm start: weights alone, from wherever they are, with a report of what fitted; and weights written for other tools."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import CheckpointError, Module, OptionError, import_checkpoint, load_weights


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 2)
        self.twin.weight = self.layer.weight


class Headed(Net):
    """As Net, with a head of its own."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(2, classes)


def trained(net: Any, *hooks: Any, path: str | Path = "run/checkpoints/made", steps: int = 2) -> Any:
    trainer = quiet(run_dir="run", hooks=hooks, max_steps=steps)
    trainer.fit(net, batches(steps))
    trainer.save_checkpoint(path)
    return net


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def bucket(memory_urls: None) -> str:
    return "memory://weights"


# ---- where from --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "load",
    [
        lambda path: load_weights(Net(), path),
        lambda path: import_checkpoint(path),
        lambda path: quiet().fit(Net(), batches(1), resume=path),
        lambda path: quiet().validate(Net(), batches(1), checkpoint=path),
        lambda path: quiet().load_best(Net(), path=path),
    ],
    ids=["load_weights", "import_checkpoint", "fit", "validate", "load_best"],
)
@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "run/last.ckpt",
            "Did you mean 'last'. run/checkpoints has: last, made. A run has its checkpoints in RUN_DIR",
        ),
        ("run/checkpoints/mode", "Did you mean 'made'. run/checkpoints has: last, made.$"),
        (
            "modell.ckpt",
            "Did you mean 'model.ckpt'. /.* has: model.ckpt, run. A run has its checkpoints in RUN_DIR",
        ),
        (
            "logs/a/x.ckpt",
            "there is no directory /.*logs/a. A run has its checkpoints in RUN_DIR/checkpoints.",
        ),
    ],
)
def test_a_path_without_a_checkpoint_names_those_that_are_there(load: Any, path: str, told: str) -> None:
    trained(Net())
    shutil.copytree("run/checkpoints/made", "run/checkpoints/last")
    torch.save({"state_dict": {}}, "model.ckpt")
    with pytest.raises(CheckpointError, match=f"^{path} does not exist[.:] {told}"):
        load(path)


@pytest.mark.parametrize("source", ["run/checkpoints/made", "run", Path("run"), "plain.safetensors"])
def test_weights_come_from_a_checkpoint_a_run_or_a_file(source: str | Path) -> None:
    net = trained(Net())
    save_file(net.state_dict(), "plain.safetensors")
    again = Net()
    report = load_weights(again, source)
    assert same(weights(again), weights(net))
    assert report.complete and sorted(report.loaded) == ["layer.bias", "layer.weight"]
    assert str(report).endswith(" -> Net: 2 of 2 weights loaded")


def test_weights_come_from_a_mapping() -> None:
    net, again = Net(), Net()
    load_weights(again, net.state_dict())
    assert same(weights(again), weights(net))


def test_weights_come_from_a_url_or_the_newest_checkpoint_below_it(bucket: str) -> None:
    trained(Net(), path=f"{bucket}/run/old")
    net = trained(Net(), path=f"{bucket}/run/new")
    for url in (f"{bucket}/run/new", f"{bucket}/run/", bucket):
        again = Net()
        assert load_weights(again, url).source == f"{bucket}/run/new"
        assert same(weights(again), weights(net))
    assert same(weights(Net.load_from_checkpoint(f"{bucket}/run")), weights(net))
    fsspec.filesystem("memory").pipe_file("/weights/run/new/model.safetensors", b"damaged")
    assert load_weights(again, bucket).source == f"{bucket}/run/old"
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_weights(again, f"{bucket}/elsewhere")


def test_a_run_gives_its_newest_whole_checkpoint_and_says_what_it_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = trained(Net(), path="run/checkpoints/old")
    trained(Net(), path="run/checkpoints/new")
    Path("run/checkpoints/new/model.safetensors").write_bytes(b"cut")
    again = Net()
    assert load_weights(again, "run").source == "run/checkpoints/old"
    assert same(weights(again), weights(net))
    assert "skipping run/checkpoints/new: " in caplog.text and "model.safetensors has 3 bytes" in caplog.text
    Path("run/checkpoints/old/manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no complete one below it(.|\n)*no manifest(.|\n)*model.safetensors has 3 bytes",
    ):
        load_weights(again, "run")


def test_a_pickled_file_is_not_read_unless_imported() -> None:
    torch.save(Net().state_dict(), "weights.pt")
    with pytest.raises(
        CheckpointError,
        match=r"To read a file of torch.save, call load_weights\(module, hookline.import_checkpoint\('weights.pt'\)\)",
    ):
        load_weights(Net(), "weights.pt")


def test_a_damaged_safetensors_file_is_named() -> None:
    Path("half.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointError, match="half.safetensors cannot be read as safetensors"):
        load_weights(Net(), "half.safetensors")


@pytest.mark.parametrize("source", [None, 3, Net()])
def test_what_holds_no_weights_is_refused(source: Any) -> None:
    with pytest.raises(OptionError, match="Weights cannot be taken from a .*pass a checkpoint"):
        load_weights(Net(), source)


# ---- what does not fit -------------------------------------------------------------------------------------------


def test_strict_loads_all_or_nothing_and_tells_why() -> None:
    source = weights(Net())
    source["layer.wieght"] = source.pop("layer.weight")
    source["head.bias"] = torch.ones(5)
    net = Headed()
    before = weights(net)
    with pytest.raises(CheckpointError) as raised:
        load_weights(net, source)
    assert same(weights(net), before)
    said = str(raised.value)
    assert "do not fit Headed, and none was loaded" in said
    assert "missing, only the module has them: layer.weight, head.weight" in said
    assert "unexpected, only the source has them: layer.wieght" in said
    assert "layer.wieght: Did you mean 'layer.weight'?" in said
    assert "head.bias ([5] in the source, [3] in the module)" in said


@pytest.mark.parametrize(
    "load", [load_weights, lambda _, path, strict: Net.load_from_checkpoint(path, strict)]
)
def test_the_name_of_a_checkpoint_is_not_taken_for_strict(load: Any) -> None:
    trained(Net())
    with pytest.raises(
        OptionError, match=r"strict='best' must be True or False.* trainer\.load_best\(module\)"
    ):
        load(Net(), "run", "best")
    with pytest.raises(OptionError, match=r"strict='raw' must be .* pass weights='raw'"):
        load(Net(), "run", "raw")


def test_a_cell_shows_the_report_as_its_text() -> None:
    trained(Net())
    report = load_weights(Net(), "run/checkpoints/made")
    assert repr(report) == str(report) == "run/checkpoints/made (step 2) -> Net: 2 of 2 weights loaded"


def test_not_strict_loads_what_fits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    old = trained(Headed(classes=5))
    net = Headed(classes=3)
    head = weights(net.head)
    report = load_weights(net, "run", strict=False)
    assert same(weights(net.layer), weights(old.layer)) and same(weights(net.head), head)
    assert report.mismatched == {"head.weight": ([5, 2], [3, 2]), "head.bias": ([5], [3])}
    assert report.loaded == ["layer.weight", "layer.bias"] and not report.missing and not report.unexpected
    assert (
        "2 of 4 weights loaded" in caplog.text and "of another shape, not loaded: head.weight" in caplog.text
    )


def test_everything_that_fits_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_weights(Net(), Net().state_dict(), strict=False)
    assert not caplog.text


def test_a_long_list_of_names_is_cut_in_the_text_only() -> None:
    report = load_weights(nn.Linear(1, 1), {f"x{n}": torch.ones(1) for n in range(30)}, strict=False)
    assert len(report.unexpected) == 30
    assert "x7 and 22 more" in str(report) and "x8" not in str(report)


def test_something_else_than_a_tensor_never_stands_for_one() -> None:
    report = load_weights(Net(), {**Net().state_dict(), "layer.bias": [0.0, 0.0]}, strict=False)
    assert report.mismatched == {"layer.bias": ("a list", [2])}


def test_tied_weights_may_be_stored_under_one_name() -> None:
    source = {name: each for name, each in weights(Tied()).items() if name != "twin.weight"}
    net = Tied()
    assert load_weights(net, source).complete
    assert torch.equal(net.twin.weight, source["layer.weight"])
    with pytest.raises(CheckpointError, match="missing, only the module has them: layer.weight, twin.weight"):
        load_weights(net, {name: each for name, each in source.items() if name != "layer.weight"})


def test_a_module_that_reads_older_names_itself_is_asked() -> None:
    class Renamed(Net):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict["layer.weight"] = state_dict.pop("old.weight", state_dict.get("layer.weight"))
            super()._load_from_state_dict(state_dict, prefix, *rest)

    net, source = Renamed(), weights(Net())
    expected = source["old.weight"] = source.pop("layer.weight")
    assert load_weights(net, source).complete
    assert torch.equal(net.layer.weight, expected)


def test_layers_without_a_shape_yet_take_the_one_that_comes() -> None:
    lazy = nn.LazyLinear(2)
    load_weights(lazy, nn.Linear(4, 2).state_dict())
    assert lazy.weight.shape == (2, 4)


def test_a_module_without_memory_is_refused() -> None:
    with pytest.raises(OptionError, match="Linear is on the meta device"):
        load_weights(nn.Linear(4, 2, device="meta"), nn.Linear(4, 2).state_dict())


# ---- other names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rename", [{"net.": ""}, lambda name: name.removeprefix("net.")])
def test_names_can_be_changed_on_the_way(rename: Any) -> None:
    net, again = Net(), Net()
    load_weights(again, {f"net.{name}": each for name, each in net.state_dict().items()}, rename=rename)
    assert same(weights(again), weights(net))


def test_the_longest_prefix_counts_and_none_leaves_a_weight_out() -> None:
    net = Headed()
    source = {
        "a.weight": torch.ones(2, 4),
        "a.bias": torch.ones(2),
        "a.b.weight": torch.ones(3, 2),
        "a.b.bias": torch.ones(3),
    }
    load_weights(net, source, rename={"a.": "layer.", "a.b.": "head."})
    assert all(bool((each == 1).all()) for each in net.parameters())
    report = load_weights(Net(), weights(net), rename=lambda name: None if name.startswith("head.") else name)
    assert report.complete


@pytest.mark.parametrize(
    ("wrapped", "hint"), [(True, r"rename=\{'module.net.': ''\}"), (False, r"rename=\{'': 'layer.'\}")]
)
def test_a_prefix_that_all_names_lack_or_have_is_suggested(wrapped: bool, hint: str) -> None:
    source = (
        {f"module.net.{name}": each for name, each in weights(Net()).items()}
        if wrapped
        else weights(Net().layer)
    )
    with pytest.raises(CheckpointError, match=hint):
        load_weights(Net(), source)


def test_a_prefix_that_nothing_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        OptionError, match=r"no name in the mapping starts with 'layr.'. Did you mean 'layer.'\?"
    ):
        load_weights(Net(), Net().state_dict(), rename={"layr.": ""})


def test_two_weights_of_one_name_are_refused() -> None:
    with pytest.raises(OptionError, match="'layer.weight' and 'layer.bias' would both be renamed to 'x'"):
        load_weights(Net(), Net().state_dict(), rename=lambda name: "x")


# ---- a module made again -----------------------------------------------------------------------------------------


def test_a_module_is_made_from_a_run_and_may_differ_if_not_strict(caplog: pytest.LogCaptureFixture) -> None:
    old = trained(Headed(classes=5))
    with pytest.raises(CheckpointError, match="do not fit Headed"):
        Headed.load_from_checkpoint("run", classes=3)
    net = Headed.load_from_checkpoint("run", strict=False, classes=3)
    assert isinstance(net, Module) and same(weights(net.layer), weights(old.layer))
    assert "2 of 4 weights loaded" in caplog.text
