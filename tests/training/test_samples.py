"""The samples behind each update of random runs, and samples that are left out."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ranks.sample_cases import Weighed, Witness, compare, plan, run
from ranks.torchrun import torchrun
from thorough import some
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookline import SKIP_STEP, Hook, Mixture, Trainer
from hookline.cli import main
from hookline.data import samples as data_samples
from hookline.data.samples import LoaderOrder
from hookline.util.errors import HooklineError, OptionError, UnknownSamples

ON_RANKS = """
import os, sys
from pathlib import Path
from ranks.sample_cases import compare, plan, run
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
pairs = 0
for seed in range(int(sys.argv[2]), int(sys.argv[3])):
    chosen = plan(seed, world_size)
    folder = Path(sys.argv[1]) / str(seed)
    seen, wrong, trainer = run(chosen, folder)
    problems = compare(seen, trainer, folder, rank)
    assert not wrong and not problems, (chosen, wrong[:3], problems[:3])
    pairs += len(seen)
print("pairs", pairs)
"""


@pytest.mark.parametrize("first", some(range(0, 16, 8), range(16, 40, 8)))
def test_the_samples_named_are_the_samples_trained_on(tmp_path: Path, first: int) -> None:
    pairs = 0
    for seed in range(first, first + 8):
        chosen = plan(seed)
        folder = tmp_path / str(seed)
        seen, wrong, trainer = run(chosen, folder)
        assert not wrong, (chosen, wrong[:3])
        assert not (problems := compare(seen, trainer, folder)), (chosen, problems[:3])
        pairs += len(seen)
    assert pairs > 100, "1,000 pairs in a thorough run, with those of several ranks"


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_the_samples_that_workers_read_are_named(tmp_path: Path, seed: int) -> None:
    seen, wrong, trainer = run(plan(seed, workers=True), tmp_path)
    assert len(seen) > 3 and not wrong and not compare(seen, trainer, tmp_path)


@pytest.mark.parametrize(("ranks", "first"), [(2, 1003), (3, 2000)])
def test_the_samples_of_all_ranks_are_named(tmp_path: Path, ranks: int, first: int) -> None:
    ended = torchrun(ON_RANKS, tmp_path, str(tmp_path), str(first), str(first + 5), ranks=ranks)
    assert ended.code == 0, ended.output
    assert [int(each) > 30 for each in ended.lines("pairs ")] == [True] * ranks


class Halves(torch.utils.data.Sampler[int]):
    """A sampler of a user: draws from its own generator."""

    def __init__(self, samples: int) -> None:
        self.samples, self.generator = samples, torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        order = torch.randperm(self.samples, generator=self.generator).tolist()
        yield from order[: self.samples // 2]

    def __len__(self) -> int:
        return self.samples // 2


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).reshape(-1, 1))


def trained(
    tmp_path: Path, data: Any, *hooks: Any, resume: bool = False, **options: Any
) -> tuple[Witness, Trainer]:
    witness = Witness(0, skips=False)
    settings = {
        "max_epochs": 3,
        "logger": False,
        "enable_progress_bar": False,
        "run_dir": tmp_path,
        "seed": 1,
    }
    trainer = Trainer(hooks=[witness, *hooks], **(settings | options))
    torch.manual_seed(1)
    trainer.fit(Weighed(), data, **({"resume": "auto"} if resume else {}))
    return witness, trainer


def test_a_sampler_of_the_user_is_drawn_again_from_a_copy(tmp_path: Path) -> None:
    sampler = Halves(20)
    witness, trainer = trained(tmp_path, DataLoader(numbers(20), batch_size=2, sampler=sampler))
    after = sampler.generator.get_state()
    for step, expected in witness.steps.items():
        assert sorted((each.loader, each.rank, each.id) for each in trainer.samples(step)) == expected
    assert torch.equal(after, sampler.generator.get_state()), "the order of the training is as before"
    with pytest.raises(
        UnknownSamples, match="order comes from .*Halves, which only the program of the run has"
    ):
        compare(witness.steps, trainer, tmp_path)


class Counts(torch.utils.data.Sampler[int]):
    """A sampler that counts its passes, so that a copy does not return the same order."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        yield from torch.randperm(20, generator=torch.Generator().manual_seed(self.passes)).tolist()

    def __len__(self) -> int:
        return 20


def test_an_order_that_cannot_be_drawn_again_is_refused(tmp_path: Path) -> None:
    _, trainer = trained(tmp_path / "a", DataLoader(numbers(20), batch_size=2, sampler=Counts()))
    for step in (1, 30):
        with pytest.raises(UnknownSamples, match=r"a copy of it returns .* where the training had .*"):
            trainer.samples(step)
    data = DataLoader(numbers(20), batch_size=2, num_workers=1, in_order=False)
    witness, trainer = trained(tmp_path / "b", data, max_epochs=1)
    assert witness.wrong[0][2] is None, "the fact is not known either"
    with pytest.raises(UnknownSamples, match="in_order=False, so the workers determine"):
        trainer.samples(1)


def test_the_state_of_a_generator_of_an_earlier_process_is_not_replaced_by_a_newer_one(
    tmp_path: Path,
) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(numbers(20), batch_size=2, sampler=Halves(20))

    witness, _ = trained(tmp_path, data(), max_epochs=2)
    rest, trainer = trained(tmp_path, data(), resume=True)
    with pytest.raises(UnknownSamples, match="does not have its state for pass 0"):
        trainer.samples(1)
    for step, expected in rest.steps.items():
        assert sorted((each.loader, each.rank, each.id) for each in trainer.samples(step)) == expected
    assert len(witness.steps) == 10 and len(rest.steps) == 5


def test_one_part_of_a_distributed_sampler_in_one_process_is_named(tmp_path: Path) -> None:
    sampler = torch.utils.data.DistributedSampler(numbers(20), num_replicas=4, rank=2)
    witness, trainer = trained(tmp_path, DataLoader(numbers(20), batch_size=2, sampler=sampler))
    assert len(witness.steps) == 9 and not compare(witness.steps, trainer, tmp_path)


def test_a_large_pass_is_drawn_once_and_its_values_are_not_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    draw = LoaderOrder._draw
    monkeypatch.setattr(LoaderOrder, "_draw", lambda *given: drawn.append(given[1]) or draw(*given))
    monkeypatch.setattr(data_samples, "MOST_VALUES", 19)
    sampler = torch.utils.data.SubsetRandomSampler(range(20))
    witness, trainer = trained(tmp_path, DataLoader(numbers(20), batch_size=2, sampler=sampler))
    for step, expected in witness.steps.items():
        assert sorted((each.loader, each.rank, each.id) for each in trainer.samples(step)) == expected
    assert drawn == [0, 1, 2]
    with pytest.raises(UnknownSamples, match="the 20 values of its SubsetRandomSampler are too many"):
        compare(witness.steps, trainer, tmp_path)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.arange(8.0).reshape(-1, 1)


def test_a_stream_has_no_indices_and_may_supply_ids_of_its_own(tmp_path: Path) -> None:
    ids = []

    class Keep(Hook):
        def on_train_batch_end(self, sample_ids: Any) -> None:
            ids.append(sample_ids)

    loader: Any = DataLoader(Stream(), batch_size=4, collate_fn=lambda rows: [torch.stack(rows)])
    keep = {"logger": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = Trainer(hooks=[Keep()], run_dir=tmp_path / "a", **keep)
    trainer.fit(Weighed(), loader)
    assert ids == [None, None]
    with pytest.raises(
        UnknownSamples, match=r"'train' cannot be computed: it is not read by index \(as an iter"
    ):
        trainer.samples(1)
    loader.sample_ids = lambda batch: [f"doc-{int(each)}" for each in batch[0].flatten()]
    Trainer(hooks=[Keep()], run_dir=tmp_path / "b", **keep).fit(Weighed(), loader)
    assert ids[2] == ["doc-0", "doc-1", "doc-2", "doc-3"]
    with pytest.raises(
        OptionError, match="'train' is not read by index .* Leave the samples out in its dataset"
    ):
        Trainer(hooks=[Leaves(0, [1])], run_dir=tmp_path / "c", **keep).fit(Weighed(), loader)


def test_a_step_that_was_not_made_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(run_dir=tmp_path, max_epochs=1, logger=False, enable_progress_bar=False)
    with pytest.raises(HooklineError, match="there was none yet"):
        trainer.samples(1)
    trainer.fit(Weighed(), DataLoader(numbers(4), batch_size=2))
    with pytest.raises(
        OptionError, match=r"samples\(3\): the run has made 2 updates, so the step is from 1 to 2"
    ):
        trainer.samples(3)
    with pytest.raises(HooklineError, match="works in a fit: hooks call it"):
        trainer.exclude_samples([1])


class Breaks(Hook):
    """Fails in a batch, and skips the updates that end with some batches."""

    def __init__(self, fails: int = -1, skips: tuple[int, ...] = ()) -> None:
        super().__init__("breaks")
        self.fails, self.skips = fails, skips
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, batch: Any) -> None:
        self.seen.append(batch[0].int().flatten().tolist())

    def on_before_backward(self, batches_seen: int) -> None:
        if batches_seen == self.fails:
            raise RuntimeError("half way")

    def on_before_optimizer_step(self, batches_seen: int) -> Any:
        return SKIP_STEP if batches_seen in self.skips else None

    def samples(self, *batches: int) -> list[int]:
        """Return the samples of these batches of the run."""
        return [sample for batch in batches for sample in self.seen[batch]]


def broken(folder: Path, data: Any, hook: Breaks, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "seed": 1}
    trainer = Trainer(hooks=[hook], run_dir=folder, **(settings | options))
    with contextlib.suppress(RuntimeError):
        trainer.fit(Weighed(), data)
    return trainer


def named(folder: Path, *where: str) -> tuple[list[int], Any]:
    """Return the samples that the command names, and whether their update was made."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["samples", str(folder), *where, "--json"]) == 0
    data = json.loads(printed.getvalue())
    found = data["steps"][0] if "steps" in data else data
    return [each["id"] for each in found["samples"]], found.get("made")


def test_an_update_that_was_begun_and_not_made_is_the_step_after_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for fails, size, last, batches in (
        (2, 1, 2, [2]),
        (5, 1, 5, [5]),
        (3, 2, 1, [2, 3]),
        (6, 3, 2, [4, 5, 6]),
    ):
        folder = tmp_path / f"{fails}-{size}"
        trainer = broken(folder, shuffled(), hook := Breaks(fails), accumulate_grad_batches=size)
        assert sorted(each.id for each in trainer.samples(last)) == sorted(
            named(folder, "--step", str(last))[0]
        )
        assert [each.id for each in trainer.samples(last + 1)] == hook.samples(*batches)
        assert named(folder, "--step", str(last + 1)) == (hook.samples(*batches), False)
        assert named(folder, "--step", str(last))[1] is True
        with pytest.raises(OptionError, match=f"to {last + 1}, which is the update that was begun and not m"):
            trainer.samples(last + 2)
        assert main(["samples", str(folder), "--step", str(last + 2)]) == 2
        assert f"from 1 to {last + 1} (an update that was begun and not" in capsys.readouterr().err
    assert main(["samples", str(tmp_path / "2-1"), "--step", "2-3"]) == 0
    table = capsys.readouterr().out
    assert "step 2: 3 samples, epoch 0, batch 1\n" in table
    assert "step 3, an update that was begun and not made: 3 samples, epoch 0, batch 2\n" in table


def test_the_samples_of_skipped_updates_are_named_by_their_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = broken(tmp_path, shuffled(), hook := Breaks(skips=(1, 7)))
    assert trainer.status == "completed" and len(hook.seen) == 8
    assert named(tmp_path, "--step", "2") == (hook.samples(2), True), "the next one makes the step"
    assert named(tmp_path, "--epoch", "0", "--batch", "1") == (hook.samples(1), None)
    assert named(tmp_path, "--epoch", "1", "--batch", "1-2") == (hook.samples(5, 6), None)
    assert named(tmp_path, "--step", "7") == (hook.samples(7), False), "the last one, at the end of the run"
    assert [each.id for each in trainer.samples(7)] == hook.samples(7)
    for given, text in (
        (["--epoch", "0", "--batch", "9"], "no batch 9 in its pass 0: the number is too high"),
        (["--epoch", "0"], "pass --step N, or --epoch E and --batch B"),
        (["--epoch", "0-1", "--batch", "1"], "--epoch 0-1: pass a number from 0 on."),
        (["--epoch", "0", "--batch", "-1"], "--batch"),
        (["--step", "8"], "The batches of an update that was skipped: --epoch E --batch B"),
    ):
        with contextlib.suppress(SystemExit):
            assert main(["samples", str(tmp_path), *given]) in (1, 2)
        assert text in capsys.readouterr().err


def test_a_validation_does_not_move_the_place_of_the_run(tmp_path: Path) -> None:
    class Looks(Hook):
        reached: ClassVar[list[Any]] = []

        def on_validation_batch_end(self, trainer: Any) -> None:
            trainer.save_checkpoint()
            self.reached.append(trainer._run.reached)

    class Validated(Weighed):
        def validation_step(self, batch: Any) -> None:
            pass

    hook = Breaks(fails=3)
    trainer = Trainer(
        hooks=[hook, Looks()], run_dir=tmp_path, seed=1, val_check_interval=2, enable_progress_bar=False
    )
    with contextlib.suppress(RuntimeError):
        trainer.fit(Validated(), shuffled(), DataLoader(numbers(18), batch_size=2))
    assert set(Looks.reached[-9:]) == {(0, 1)} and len(Looks.reached) >= 9
    assert [each.id for each in trainer.samples(4)] == named(tmp_path, "--step", "4")[0] == hook.samples(3)


# ---- mixtures that change


class Changes(Hook):
    """Changes the mixture of a run several times: weights, a loader that is added, one that is removed."""

    def on_train_start(self, trainer: Any, batches_seen: int) -> None:
        self.added = shuffled()
        if batches_seen > 6:
            trainer.loaders.add("later", self.added, weight=2.0)

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == 3:
            trainer.loaders.set_weights({"web": 5.0})
        elif batches_seen == 6:
            trainer.loaders.add("later", self.added, weight=2.0)
        elif batches_seen == 9:
            trainer.loaders.remove("code")


@pytest.mark.parametrize(("when", "crash"), [("cycle", -1), ("cycle", 4), ("cycle", 7), ("end", 7)])
def test_the_samples_of_a_mixture_that_changes_are_named(tmp_path: Path, when: str, crash: int) -> None:
    def data() -> dict[str, Any]:
        more = {"weights": {"web": 1.0, "code": 3.0}, "window": 2, "when_exhausted": when}
        loaders = {"web": shuffled(), "code": DataLoader(numbers(7), batch_size=2, shuffle=True)}
        return {"train": loaders, "mixture": Mixture("weighted", **more)}

    seen, wrong = {}, []
    for at in (crash, -1) if crash > 0 else (-1,):
        witness = Witness(0, skips=False, crash=at)
        trainer = Trainer(
            hooks=[witness, Changes()],
            max_epochs=3,
            seed=1,
            run_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
        )
        with contextlib.suppress(RuntimeError):
            trainer.fit(Weighed(), **data(), **({"resume": "auto"} if seen else {}))
        seen |= witness.steps
        wrong += witness.wrong
    assert not wrong and len(seen) > 15 and not compare(seen, trainer, tmp_path)


# ---- samples that are left out


class Leaves(Hook):
    """Leaves samples out after so many batches; 0: before the first. Then goes back, if it must."""

    def __init__(self, at: int, samples: list[int], back: bool = False, crash: int = -1) -> None:
        super().__init__("leaves")
        self.at, self.samples, self.back, self.crash = at, samples, back, crash

    def on_train_start(self, trainer: Any) -> None:
        if self.at == 0:
            trainer.exclude_samples(self.samples, reason="a test")

    def on_train_batch_end(self, trainer: Any, batches_seen: int, epoch: int) -> None:
        if batches_seen == self.at and not self.done:
            trainer.exclude_samples(self.samples, reason="a test")
            if self.back:
                trainer.roll_back()
            self.done = True
        if batches_seen == self.crash:
            trainer.save_checkpoint()
        if batches_seen == self.crash + 1 >= 1:
            raise RuntimeError("half way")

    done = False


class Saves(Hook):
    def __init__(self, at: int) -> None:
        super().__init__("saves")
        self.at = at

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.at:
            trainer.save_checkpoint()


def order_of(witness: Witness) -> list[int]:
    return [sample for step in sorted(witness.steps) for _, _, sample in witness.steps[step]]


def shuffled() -> DataLoader[Any]:
    return DataLoader(numbers(13), batch_size=3, shuffle=True, drop_last=True)


def test_samples_are_left_out_from_the_first_batch_and_batches_stay_full(tmp_path: Path) -> None:
    witness, trainer = trained(tmp_path, shuffled(), Leaves(0, [2, 5]))
    assert sorted(witness.steps) == list(range(1, 10)), "3 epochs of 11 // 3 batches"
    assert not {2, 5} & set(order_of(witness))
    assert all(len(each) == 3 for each in witness.steps.values())
    assert not compare(witness.steps, trainer, tmp_path)
    plain, _ = trained(tmp_path / "plain", shuffled(), max_epochs=1)
    first = [each for each in order_of(plain) if each not in (2, 5)]
    assert set(first[:6]) <= set(order_of(witness)[:9]), "the others keep their order"


def test_samples_are_left_out_from_the_next_epoch_on_if_the_data_is_open(tmp_path: Path) -> None:
    witness, trainer = trained(tmp_path, shuffled(), Leaves(2, [2, 5]))
    plain, _ = trained(tmp_path / "plain", shuffled())
    assert {step: witness.steps[step] for step in range(1, 5)} == {s: plain.steps[s] for s in range(1, 5)}
    later = [sample for step in range(5, 11) for _, _, sample in witness.steps[step]]
    assert len(later) == 18 and not {2, 5} & set(later)


@pytest.mark.parametrize("crash", [3, 4, 6, 8])
def test_exclusions_are_exact_across_a_resume(tmp_path: Path, crash: int) -> None:
    whole, trainer = trained(tmp_path / "whole", shuffled(), Leaves(2, [2, 5]))
    with pytest.raises(RuntimeError, match="half way"):
        trained(tmp_path / "cut", shuffled(), Leaves(2, [2, 5], crash=crash))
    rest, resumed = trained(tmp_path / "cut", shuffled(), Leaves(-1, []), resume=True)
    assert rest.steps and rest.steps == {step: whole.steps[step] for step in rest.steps}
    for step in range(1, 11):
        assert resumed.samples(step) == trainer.samples(step)
    assert not compare(whole.steps, resumed, tmp_path / "cut")


def test_after_going_back_they_are_left_out_at_once(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", shuffled())
    third = [sample for _, _, sample in plain.steps[3]]
    witness, trainer = trained(tmp_path, shuffled(), Saves(1), Leaves(3, third, back=True))
    assert witness.steps[1] == plain.steps[1] and witness.steps[2] == plain.steps[2]
    later = [sample for step in range(2, max(witness.steps) + 1) for _, _, sample in witness.steps[step]]
    assert not set(third) & set(later)
    assert not compare(witness.steps, trainer, tmp_path)


def test_going_back_over_passes_keeps_the_states_of_a_generator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Asks(Hook):
        def on_train_batch_end(self, trainer: Any, step: int) -> None:
            trainer.samples(step)

    data = DataLoader(numbers(13), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(2))
    third, back = [0, 1, 2, 3, 4], Leaves(7, [0, 1, 2, 3, 4], back=True)
    witness, trainer = trained(tmp_path, data, Saves(1), Asks(), back)
    later = [sample for step in range(2, max(witness.steps) + 1) for _, _, sample in witness.steps[step]]
    assert not set(third) & set(later) and not compare(witness.steps, trainer, tmp_path)
    assert "did not deliver the expected batch" not in caplog.text, "it is without some of its samples"


def test_a_loader_whose_samples_are_all_excluded_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="yielded no batch in epoch 1: 13 of its samples are excluded"):
        trained(tmp_path, shuffled(), Leaves(2, [*range(13)]))


def test_a_longer_list_at_a_resume_holds_from_there_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        trained(tmp_path, shuffled(), Leaves(0, [2], crash=2))
    rest, trainer = trained(tmp_path, shuffled(), Leaves(0, [2, 7]), resume=True)
    assert min(rest.steps) == 3 or min(rest.steps) == 4
    assert not {2, 7} & set(order_of(rest))
    assert not compare(rest.steps, trainer, tmp_path)


def test_a_wrong_sample_or_loader_is_refused(tmp_path: Path) -> None:
    for samples, text in (([13], "no such sample: 13. .* from 0 to 12"), ([True], "no such sample: True")):
        with pytest.raises(OptionError, match=text):
            trained(tmp_path / str(samples), shuffled(), Leaves(0, samples))
    two = {"web": shuffled(), "code": shuffled()}
    with pytest.raises(OptionError, match=r"several training loaders: web, code. Pass loader="):
        trained(tmp_path / "two", two, Leaves(0, [1]))
