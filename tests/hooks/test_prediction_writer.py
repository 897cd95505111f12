"""Predictions written during `trainer.predict`: the same as the returned ones, also on ranks, killed, or on a full disk."""

from __future__ import annotations

import gc
import json
import resource
import signal
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from ranks.torchrun import environment, torchrun
from test_budgets import is_ours, per_step, with_hooks, without_hooks
from tiny import Net, batches, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hookline import Hook, HooklineError, Module, OptionError, read_predictions
from hookline.cli import main
from hookline.hooks import PredictionWriter, WeightAveraging

INPUTS = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))


class Nested(Net):
    """Returns all kinds of values."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        (inputs,) = batch
        made = self.layer(inputs)
        texts = [f"{each:.3f}" for each in inputs[:, 0].tolist()]
        return {"made": made, "best": (made.argmax(1), texts), "none": None}


def loader(size: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(INPUTS), size, **options)


def predict(module: Module, loaders: Any, hook: PredictionWriter, **options: Any) -> Any:
    """Predict with the hook; return the predictions that it has written."""
    assert quiet(hooks=[hook], **options).predict(module, loaders) == []
    assert hook.folder is not None
    return read_predictions(hook.folder)


def test_what_it_writes_is_what_predict_returns(tmp_path: Path) -> None:
    net, hook = Nested(), PredictionWriter(shard_batches=2)
    returned = quiet().predict(net, loader())
    found = list(predict(net, loader(), hook, run_dir=str(tmp_path)))
    assert hook.folder == tmp_path / "predictions" and len(list(hook.folder.glob("*.jsonl"))) == 2
    assert torch.equal(
        torch.stack([each["made"] for each in found]), torch.cat([each["made"] for each in returned])
    )
    assert [each["best"][1] for each in found] == [text for each in returned for text in each["best"][1]]
    assert [int(each["best"][0]) for each in found] == torch.cat(
        [each["best"][0] for each in returned]
    ).tolist()
    assert {each["none"] for each in found} == {None}
    whole = predict(net, loader(), PredictionWriter(per="batch"), run_dir=str(tmp_path))
    assert [each["made"].tolist() for each in whole] == [each["made"].tolist() for each in returned]


class Bucketed:
    """A batch sampler that sorts the samples, as one by length does."""

    def __iter__(self) -> Iterator[list[int]]:
        order = INPUTS[:, 0].argsort().tolist()
        return (order[first : first + 4] for first in range(0, 11, 4))

    def __len__(self) -> int:
        return 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(each,) for each in INPUTS])


@pytest.mark.parametrize(
    ("source", "has_indices"),
    [
        (lambda: loader(shuffle=True), True),
        (lambda: DataLoader(TensorDataset(INPUTS), batch_sampler=Bucketed()), True),
        (lambda: loader(4, num_workers=2), True),
        (lambda: [(INPUTS[:5],), (INPUTS[5:],)], False),
        (lambda: DataLoader(Stream(), 4), False),
    ],
    ids=["shuffled", "bucketed", "workers", "list", "stream"],
)
def test_the_order_of_the_dataset_is_restored(source: Any, has_indices: bool, tmp_path: Path) -> None:
    net = Nested()
    found = predict(net, source(), PredictionWriter(), run_dir=str(tmp_path))
    assert torch.allclose(torch.stack([each["made"] for each in found]), net.layer(INPUTS).detach())
    assert (found.indices is not None) is has_indices


def test_samples_with_names_instead_of_numbers_come_in_the_order_of_the_loader(tmp_path: Path) -> None:
    class Named(Dataset[Any]):
        def __getitem__(self, name: Any) -> Any:
            return (INPUTS[int(name)],)

    names = [str(each) for each in range(11)]
    found = predict(
        Nested(), DataLoader(Named(), 4, sampler=names), PredictionWriter(), run_dir=str(tmp_path)
    )
    assert found.indices.tolist() == [*range(11)]


def test_several_loaders_are_read_by_name_and_hostile_names_stay_inside_the_folder(tmp_path: Path) -> None:
    evil = "../../évil\n$"
    hook = PredictionWriter("out")
    data = {"one": loader(), evil: [(INPUTS[:2],)]}
    trainer = quiet(hooks=[hook], run_dir=str(tmp_path / "run"))
    assert trainer.predict(Nested(), data) == [[], []]
    assert hook.folder is not None and hook.folder == tmp_path / "run" / "out"
    assert {each.name for each in tmp_path.iterdir()} == {"run"}
    assert (len(read_predictions(hook.folder, "one")), len(read_predictions(hook.folder, evil))) == (11, 2)
    with pytest.raises(OptionError, match="several loaders: pass loader= with one of 'one', "):
        read_predictions(hook.folder)
    with pytest.raises(OptionError, match="Did you mean 'one'"):
        read_predictions(hook.folder, "oen")


def test_two_runs_are_never_mixed(tmp_path: Path) -> None:
    hook, other = PredictionWriter(), PredictionWriter(tmp_path / "mine")
    for expected in ("predictions", "predictions-2"):
        predict(Nested(), loader(), hook, run_dir=str(tmp_path))
        assert hook.folder is not None and hook.folder.name == expected
    (tmp_path / "mine").mkdir()  # an empty folder is fine
    predict(Nested(), loader(), other)
    assert not Path("runs").exists()  # the folder is elsewhere, so there is no run's directory
    with pytest.raises(OptionError, match=r"dirpath='.*mine' is not an empty folder.*not mixed"):
        quiet(hooks=[other]).predict(Nested(), loader())
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="file' is not an empty folder"):
        quiet(hooks=[PredictionWriter(tmp_path / "file")]).predict(Nested(), loader())


def test_the_directory_of_a_run_stands_for_its_newest_predictions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 12):
        caplog.clear()
        hook = PredictionWriter()
        quiet(hooks=[hook], run_dir=tmp_path).predict(Net(), [(torch.ones(1, 4) * number,)])
        assert (f"written to {hook.folder}" in caplog.text) == (number > 1)
        assert torch.equal(read_predictions(tmp_path)[0], read_predictions(hook.folder)[0])
    assert hook.folder == tmp_path / "predictions-11"


def test_nothing_is_kept_in_memory_unless_it_is_asked_for() -> None:
    made: list[weakref.ref[Tensor]] = []
    most = 0

    class Counts(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal most
            gc.collect()
            most = max(most, sum(each() is not None for each in made))
            outputs = self.layer(batch[0])
            made.append(weakref.ref(outputs))
            return outputs

    data = [(INPUTS,)] * 10
    assert len(quiet().predict(Counts(), data)) == 10 and most == 9
    for options in ({"hooks": [PredictionWriter(shard_batches=2)]}, {}):
        made, most = [], 0
        kept = {} if options else {"return_predictions": False}
        assert quiet(**options).predict(Counts(), data, **kept) == [] and most <= 1
    assert len(quiet(hooks=[PredictionWriter()]).predict(Counts(), data, return_predictions=True)) == 10


def test_what_cannot_be_written_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    class Odd(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"ok": batch[0], "odd": [{1}] * len(batch[0])}

    hook = PredictionWriter()
    with pytest.raises(HooklineError, match=r"outputs\['odd'\]\[0\] is a set and cannot be written"):
        quiet(hooks=[hook], run_dir=str(tmp_path)).predict(Odd(), loader())
    assert hook.folder is not None
    with pytest.raises(HooklineError, match=r"rank 0 failed \(PredictionWriter: outputs\['odd'\]"):
        read_predictions(hook.folder)

    class Huge(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return [10**5000 if batch_idx == 1 else 1] * len(batch[0])  # JSON refuses it, with its own error

    hook.on_error = "warn"
    quiet(hooks=[hook], run_dir=str(tmp_path)).predict(Huge(), loader())
    with pytest.raises(HooklineError, match=r"rank 0 failed \(Exceeds the limit"):
        read_predictions(hook.folder)
    hook.on_error = "raise"

    class Fewer(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0][1:]

    with pytest.raises(HooklineError, match="has 2 entries for a batch of 3 samples"):
        quiet(hooks=[hook], run_dir=str(tmp_path)).predict(Fewer(), loader())


def test_a_pass_that_fails_or_is_stopped_leaves_what_it_has_and_says_why(tmp_path: Path) -> None:
    class Ends(Nested):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise KeyError("broken")
            return super().predict_step(batch, batch_idx)

    class Stops(Hook):
        def on_predict_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.stop("enough")

    hook = PredictionWriter()
    with pytest.raises(KeyError):
        quiet(hooks=[hook], run_dir=str(tmp_path)).predict(Ends(), loader())
    assert hook.folder is not None
    found = read_predictions(hook.folder, partial=True)
    assert (len(found), found.problem) == (6, "rank 0 failed (KeyError: 'broken')")
    quiet(hooks=[hook, Stops()], run_dir=str(tmp_path)).predict(Nested(), loader())
    found = read_predictions(hook.folder, partial=True)
    assert (len(found), found.problem) == (6, "rank 0 stopped (enough)")


KILLED = """
    import os, signal, sys, torch
    from hooks.test_prediction_writer import Nested, loader
    from tiny import quiet
    from hookline.hooks import PredictionWriter

    class Killed(Nested):
        def predict_step(self, batch, batch_idx):
            if batch_idx == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().predict_step(batch, batch_idx)

    quiet(hooks=[PredictionWriter("out", shard_batches=2)], run_dir=".").predict(Killed(), loader(2))
"""


def test_a_killed_run_leaves_its_shards_and_is_not_complete(tmp_path: Path) -> None:
    done = preloaded.run(
        [sys.executable, "-c", textwrap.dedent(KILLED)], cwd=tmp_path, env=environment(), timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(HooklineError, match="rank 0 has not finished, or its process was killed"):
        read_predictions(tmp_path / "out")
    found = read_predictions(tmp_path / "out", partial=True)
    assert found.indices is not None and found.indices.tolist() == [*range(8)]  # two shards of two batches
    assert [each["best"][1] for each in found] == [f"{each:.3f}" for each in INPUTS[:8, 0].tolist()]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A file may have 600 bytes: a write beyond that fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("on_error", ["raise", "warn", "disable"])
@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_ends_the_pass_or_continues_it_as_the_hook_says(on_error: str, tmp_path: Path) -> None:
    class Large(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0] if batch_idx < 2 else batch[0].repeat(1, 100)

    hook = PredictionWriter(shard_batches=1)
    hook.on_error = on_error
    trainer = quiet(hooks=[hook], run_dir=str(tmp_path))
    if on_error == "raise":
        with pytest.raises(HooklineError, match=r"rank-0-00002.safetensors could not be written.*too large"):
            trainer.predict(Large(), loader())
    else:
        trainer.predict(Large(), loader())
        assert trainer.status == "completed"
    assert hook.folder is not None and not list(hook.folder.glob(".*"))
    found = read_predictions(hook.folder, partial=True)
    assert len(found) == 6 and not found.complete


def test_it_writes_what_averaged_weights_predict(tmp_path: Path) -> None:
    average = WeightAveraging(decay=0.5)
    hook, net = PredictionWriter(), Net()
    trainer = quiet(hooks=[average, hook], run_dir=str(tmp_path))
    trainer.fit(net, batches(4))
    trainer.predict(net, loader())
    assert hook.folder is not None
    found = torch.stack(list(read_predictions(hook.folder)))
    expected = INPUTS @ average.averages["layer.weight"].T + average.averages["layer.bias"]
    assert torch.allclose(found, expected) and not torch.allclose(found, net.layer(INPUTS))


def test_the_command_line_prints_the_folder_and_writes_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "predicting_parts.py").write_text(
        "import torch\nfrom hookline import DataModule\nfrom hookline.testing import TinyModule as Net\n"
        "class Data(DataModule):\n"
        "    def predict_dataloader(self): return [torch.ones(2, 4)] * 3\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run.toml").write_text(
        'module = "predicting_parts.Net"\ndatamodule = "predicting_parts.Data"\n'
        '[trainer]\nenable_progress_bar = false\nrun_dir = "run"\n[hooks.prediction_writer]\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "run.toml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["predictions"]) == tmp_path / "run" / "predictions"
    assert len(read_predictions(result["predictions"])) == 6
    assert not (tmp_path / "run" / "predictions.jsonl").exists()


def test_it_costs_nothing_in_training() -> None:
    assert (
        per_step(with_hooks(PredictionWriter()), is_ours) - without_hooks(is_ours) < 0.5
    )  # a listener is one call


ON_RANKS = """
    import os, time, torch
    from hooks.test_prediction_writer import INPUTS, Nested
    from tiny import quiet
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from hookline import read_predictions
    from hookline.hooks import PredictionWriter
    rank = int(os.environ["RANK"])
    data = TensorDataset(INPUTS)
    torch.manual_seed(0)
    net = Nested()
    sources = {
        "samples": DataLoader(data, 2),
        "own": DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank, shuffle=True)),
        "batches": [(each,) for each in INPUTS.split(2)][:5],
    }
    for name, source in sources.items():
        hook = PredictionWriter(name, shard_batches=2)
        quiet(strategy="ddp", device="cpu", run_dir="run", hooks=[hook]).predict(net, source)
    if rank == 0:
        torch.save(net.layer(INPUTS).detach(), "expected.pt")
    class Slow(PredictionWriter):
        def on_predict_end(self, state):
            time.sleep(0.3 * rank)
            super().on_predict_end(state)
    slow = Slow("slow")
    quiet(strategy="ddp", device="cpu", run_dir="run", hooks=[slow]).predict(net, sources["samples"])
    print("READ", len(read_predictions(slow.folder)))  # rank 0 is here first
    unnamed = PredictionWriter()
    quiet(strategy="ddp", device="cpu", hooks=[unnamed]).predict(net, sources["samples"])
    print("FOLDER", unnamed.folder)
    class Fails(Nested):
        def predict_step(self, batch, batch_idx):
            if rank == 1 and batch_idx == 1:
                raise KeyError("only here")
            return super().predict_step(batch, batch_idx)
    try:
        quiet(strategy="ddp", device="cpu", run_dir="run", hooks=[PredictionWriter("failed")]).predict(
            Fails(), sources["samples"])
    except BaseException as error:
        print("FAILED", rank, type(error).__name__)
"""


def test_every_rank_writes_its_part_and_the_order_is_that_of_one_process(tmp_path: Path) -> None:
    outcome = torchrun(ON_RANKS, tmp_path)
    assert len(outcome.lines("FAILED ")) == 2, outcome.output
    assert outcome.lines("READ ") == ["11", "11"], outcome.output  # on every rank, right after predict
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for name, count in (("samples", 11), ("own", 11), ("batches", 10)):
        found = read_predictions(tmp_path / "run" / name)
        assert torch.allclose(torch.stack([each["made"] for each in found]), expected[:count]), name
        assert {each.name.split("-")[1] for each in found.folder.glob("*.jsonl")} == {"0", "1"}
    (folder,) = set(outcome.lines("FOLDER "))
    assert len(read_predictions(folder)) == 11
    failed = read_predictions(tmp_path / "run" / "failed", partial=True)
    assert not failed.complete and len(failed) >= 2
