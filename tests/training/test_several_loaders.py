"""Training on several named loaders: what is drawn, what is learnt, what is logged, and what a resume makes of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data.resumed import Dropping, Samples
from thorough import some
from tiny import Net, quiet, shown
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hookline import END_EPOCH, SKIP_BATCH, Hook, Mixture, OptionError
from hookline.data.mixing import schedule
from hookline.util.errors import CheckpointError, HooklineError

Batch = tuple[Tensor, Tensor]


def marked(first: int, n: int, size: int = 3) -> list[Batch]:
    """`n` batches; `mark` says which one each is."""
    generator = torch.Generator().manual_seed(first)
    made = [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(n)
    ]
    for index, (x, _) in enumerate(made):
        x[0, 0] = (first + index) / 100
    return made


def mark(batch: Any) -> int:
    return round(batch[0].flatten()[0].item() * 100)


def two(web: int = 5, code: int = 3) -> dict[str, Any]:
    return {"web": marked(100, web), "code": marked(200, code, size=2)}


class Seen(Hook):
    """Which batch of which loader, in order; asks for checkpoints after some of them."""

    def __init__(self, folder: Path | None = None, cuts: Sequence[int] = ()) -> None:
        self.folder, self.cuts = folder, cuts
        self.batches: list[tuple[int, str, int]] = []

    def on_train_batch_end(
        self, trainer: Any, batch: Any, dataloader_idx: int, dataloader_name: str, batches_seen: int
    ) -> None:
        self.batches.append((dataloader_idx, dataloader_name, mark(batch)))
        if batches_seen in self.cuts:
            assert self.folder is not None
            trainer.save_checkpoint(self.folder / f"after-{batches_seen}")

    @property
    def names(self) -> str:
        return "".join(name[0] for _, name, _ in self.batches)


class Rows(Hook):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_metrics(self, metrics: Any) -> None:
        self.rows.append(dict(metrics))


def by_hand(picks: list[Batch], lr: float = 0.1) -> dict[str, Tensor]:
    torch.manual_seed(3)
    net = Net(lr)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for x, y in picks:
        optimizer.zero_grad()
        F.mse_loss(net.layer(x), y).backward()
        optimizer.step()
    return net.state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- what is drawn -------------------------------------------------------------------------------------------------


def test_without_a_mixture_each_loader_has_its_turn_until_every_batch_was_drawn_once() -> None:
    seen, data = Seen(), two()
    torch.manual_seed(3)
    trainer = quiet(hooks=[seen])
    trainer.fit(Net(), data)
    assert seen.names == "wcwcwcww"
    assert [idx for idx, _, _ in seen.batches] == [0, 1, 0, 1, 0, 1, 0, 0]
    streams = {name: iter(source) for name, source in data.items()}
    assert same(trainer.module.state_dict(), by_hand([next(streams[name]) for _, name, _ in seen.batches]))


ORDERS: list[dict[str, Any]] = [
    {"order": "sequential"},
    {"order": "round_robin"},
    {"order": "round_robin", "burst": 2},
    {"order": "random"},
    {"order": "alternating", "pattern": ["web", "code", "code"]},
    {"order": "weighted", "weights": {"web": 3, "code": 1}},
    {"order": "random", "weights": {"web": 3, "code": 1}, "seed": 5, "burst": 2},
]


LENGTHS = ("sum", "max", "min", 11)
EACH_ONCE = [
    *((settings, "sum", None) for settings in ORDERS),
    *((ORDERS[1], length, "cycle") for length in LENGTHS),
    *((ORDERS[5], length, "end") for length in LENGTHS),
]
COMBINED = itertools.product(ORDERS, LENGTHS, (None, "cycle", "end"))


@pytest.mark.parametrize(
    ("settings", "epoch_length", "when_exhausted"),
    some(EACH_ONCE, (each for each in COMBINED if each not in EACH_ONCE)),
    ids=shown,
)
def test_training_visits_what_the_schedule_says_and_equals_the_loop_by_hand(
    settings: dict[str, Any], epoch_length: Any, when_exhausted: Any
) -> None:
    mixture = Mixture(**settings, epoch_length=epoch_length, when_exhausted=when_exhausted)
    data, seen = two(), Seen()
    torch.manual_seed(3)
    trainer = quiet(hooks=[seen], max_epochs=2)
    trainer.fit(Net(), data, mixture=mixture)
    expected: list[tuple[str, Batch]] = []
    for epoch in range(2):
        streams = {name: itertools.cycle(source) for name, source in data.items()}
        picks = [list(data)[pick.loader] for pick in schedule(mixture, {"web": 5, "code": 3}, epoch)]
        expected += [(name, next(streams[name])) for name in picks]
    assert [each[1:] for each in seen.batches] == [(name, mark(batch)) for name, batch in expected]
    assert same(trainer.module.state_dict(), by_hand([batch for _, batch in expected]))


def test_a_list_of_loaders_gets_names_and_a_list_of_batches_stays_one_loader() -> None:
    seen, one = Seen(), Seen()
    loaders = [DataLoader(Samples(6), batch_size=3), DataLoader(Samples(3), batch_size=3)]
    quiet(hooks=[seen]).fit(Net(), loaders)
    quiet(hooks=[one]).fit(Net(), marked(0, 3))
    assert [name for _, name, _ in seen.batches] == ["dl0", "dl1", "dl0"]
    assert [each[:2] for each in one.batches] == [(0, "train")] * 3


def test_a_data_module_may_say_how_its_loaders_are_mixed() -> None:
    from hookline import DataModule

    class Data(DataModule):
        mixture = {"order": "sequential"}  # noqa: RUF012

        def train_dataloader(self) -> Any:
            return two()

    seen, other = Seen(), Seen()
    quiet(hooks=[seen]).fit(Net(), datamodule=Data())
    quiet(hooks=[other]).fit(Net(), datamodule=Data(), mixture=Mixture("round_robin"))
    assert (seen.names, other.names) == ("wwwwwccc", "wcwcwcww")


def endless(first: int) -> Any:
    class Endless:
        def __iter__(self) -> Iterator[Batch]:
            return itertools.cycle(marked(first, 3))

    return Endless()


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "round_robin"},
        {"order": "random"},
        {"order": "weighted", "weights": {"web": 1, "code": 1}},
        {"order": "sequential"},
        {"order": "alternating", "pattern": ["web", "code"]},
    ],
    ids=shown,
)
def test_endless_loaders_train_for_a_fixed_number_of_batches(settings: dict[str, Any]) -> None:
    seen = Seen()
    data = {"code": marked(0, 2), "web": endless(100)}
    quiet(hooks=[seen], max_epochs=2).fit(Net(), data, mixture=Mixture(**settings, epoch_length=6))
    assert len(seen.batches) == 12
    assert {"w", "c"} == set(seen.names[:6]) == set(seen.names[6:])


def test_a_generator_can_be_gone_through_once_and_what_comes_then_is_said() -> None:
    data = {"web": (each for each in marked(0, 3)), "code": marked(9, 3)}
    mixture = Mixture(epoch_length=6, when_exhausted="end")
    quiet().fit(Net(), data, mixture=mixture)
    with pytest.raises(OptionError, match=r"'web' did not yield a batch.*epoch 0.*only once"):
        quiet().fit(Net(), data, mixture=mixture)


def test_a_loader_of_unknown_length_may_end_early_and_the_window_it_was_in_is_closed() -> None:
    class Short:
        def __iter__(self) -> Iterator[Batch]:
            return iter(marked(0, 2))

    seen = Seen()
    trainer = quiet(hooks=[seen], accumulate_grad_batches=4)
    trainer.fit(
        Net(), {"web": Short(), "code": marked(50, 3)}, mixture=Mixture(epoch_length=20, when_exhausted="end")
    )
    assert seen.names == "wcwcc" and trainer.global_step == 2


def test_a_loader_that_ends_before_its_length_is_an_error_not_another_pass() -> None:
    class Lying(Samples):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise StopIteration
            return super().__getitem__(index)

    with pytest.raises(OptionError, match="'web' ended after 2 of 4 batches"):
        quiet().fit(
            Net(),
            {"web": DataLoader(Lying(8), batch_size=2), "code": marked(0, 4)},
            mixture=Mixture(epoch_length=20),
        )


# ---- what is refused ---------------------------------------------------------------------------------------------------


class NoLength:
    def __iter__(self) -> Iterator[Batch]:
        return iter(())


@pytest.mark.parametrize(
    ("data", "mixture", "text"),
    [
        (
            two(),
            {"order": "alternating", "pattern": ["wbe", "code"]},
            "pattern names 'wbe'.*Did you mean 'web'",
        ),
        (two(), {"order": "weighted", "weights": {"web": 1, "cod": 1}}, "weights names 'cod'.*'code'"),
        (two(), {"order": "weighted", "weights": {"web": 0, "code": 0}}, "all weights are 0"),
        (two(), {"order": "weighted", "weights": {"web": 1}}, "has no entry for the loader 'code'"),
        (two(), {"loss_weights": {"cde": 1}}, "loss_weights names 'cde'"),
        (two(), {"optimizers": {"cde": 0}}, "optimizers names 'cde'"),
        (
            two(),
            {"optimizers": {"code": 1}},
            "'code' should train optimizer 1, which does not exist. Optimizers: 0 .SGD.",
        ),
        (two(), {"ordre": "random"}, "no setting 'ordre'.*'order'"),
        (two(), "random", "takes a hookline.Mixture or a table"),
        ({"web": [], "code": marked(0, 2)}, None, "training loader 'web' is empty"),
        ({"web": NoLength(), "code": marked(0, 2)}, None, "'web' has no length; give a number of batches"),
        ({1: marked(0, 2), "1": marked(0, 2)}, None, "Two train loaders have the same name"),
        ({}, None, "fit needs a training loader"),
    ],
    ids=shown,
)
def test_what_cannot_work_is_refused_with_names_before_the_first_batch(
    data: Any, mixture: Any, text: str
) -> None:
    seen = Seen()
    with pytest.raises(OptionError, match=text):
        quiet(hooks=[seen]).fit(Net(), data, mixture=mixture)
    assert not seen.batches


@pytest.mark.parametrize("when_exhausted", ["cycle", "end"])
def test_a_loader_that_yields_nothing_is_named(when_exhausted: Any) -> None:
    mixture = Mixture(epoch_length=6, when_exhausted=when_exhausted)
    with pytest.raises(OptionError, match="loader 'web' did not yield a batch"):
        quiet().fit(Net(), {"code": marked(0, 2), "web": NoLength()}, mixture=mixture)


def test_a_schedule_that_leaves_a_loader_out_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    quiet().fit(Net(), two(), mixture=Mixture("weighted", {"web": 1000, "code": 1}, epoch_length=4))
    assert "contains no batch of 'code'" in caplog.text


def test_one_loader_has_nothing_to_mix_and_says_so() -> None:
    trainer = quiet()
    trainer.fit(Net(), marked(0, 2))
    assert trainer.loaders.names == ["train"]
    with pytest.raises(HooklineError, match="does not mix training loaders"):
        trainer.loaders.set_weights({"train": 1})


# ---- skipped batches, windows, limits ----------------------------------------------------------------------------------


class Meddling(Hook):
    """Does something unusual at some batches."""

    def __init__(self, skip: tuple[int, ...] = (), end: tuple[int, ...] = ()) -> None:
        self.skip, self.end = skip, end

    def on_train_batch_start(self, batch_idx: int) -> Any:
        return SKIP_BATCH if batch_idx in self.skip else END_EPOCH if batch_idx in self.end else None


def windows(
    data: dict[str, Any], picks: str, skip: tuple[int, ...], size: int, lr: float = 0.1
) -> dict[str, Tensor]:
    """Windows of `size` batches, the mean of the losses that are there, by hand."""
    torch.manual_seed(3)
    net = Net(lr)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    streams = {name[0]: iter(source) for name, source in data.items()}
    drawn = [next(streams[letter]) for letter in picks]
    for start in range(0, len(drawn), size):
        used = [batch for index, batch in enumerate(drawn[start : start + size], start) if index not in skip]
        optimizer.zero_grad()
        for x, y in used:
            (F.mse_loss(net.layer(x), y) / len(used)).backward()
        if used:
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("skip", [(), (1,), (2, 3, 4), (6, 7)])
def test_windows_go_across_loaders_and_a_skipped_batch_only_leaves_its_window(skip: tuple[int, ...]) -> None:
    data = two()
    torch.manual_seed(3)
    trainer = quiet(hooks=[Meddling(skip)], accumulate_grad_batches=3)
    trainer.fit(Net(), data)
    expected = windows(data, "wcwcwcww", skip, 3)
    for name, value in trainer.module.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert trainer.global_step == sum(
        1 for start in (0, 3, 6) if not {*range(start, min(start + 3, 8))} <= set(skip)
    )


def test_no_loss_and_a_loss_that_is_not_finite_leave_their_loaders_mean_alone() -> None:
    class Odd(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss * float("nan") if batch_idx == 2 else loss * 0 + batch_idx

    trainer = quiet(nonfinite="skip")
    trainer.fit(Odd(), two())  # w0 c1 w2 c3 w4 c5 w6 w7
    assert trainer.metrics["train/dl_web/loss"] == pytest.approx((0 + 4 + 6 + 7) / 4)
    assert trainer.metrics["train/dl_code/loss"] == pytest.approx((3 + 5) / 2)
    assert trainer.metrics["train/loss"] == pytest.approx((3 * (0 + 4 + 6 + 7) + 2 * (3 + 5)) / 16)


def test_an_epoch_that_is_ended_leaves_the_rest_and_the_next_one_begins_anew() -> None:
    seen = Seen()
    quiet(hooks=[Meddling(end=(3,)), seen], max_epochs=2, accumulate_grad_batches=2).fit(Net(), two())
    assert [number for _, _, number in seen.batches] == [100, 200, 101] * 2


def test_validation_in_the_middle_of_an_epoch_leaves_the_loaders_facts_alone() -> None:
    class After(Hook):
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def on_validation_end(self, state: Any) -> None:
            self.heard.append(state.batches_seen)

        def on_step_end(self, state: Any) -> None:
            self.heard.append(state.dataloader_name[0])

    after, seen = After(), Seen()
    trainer = quiet(hooks=[after, seen], val_check_interval=3)
    trainer.fit(Net(), two(), {"a": marked(0, 1), "b": marked(0, 2)})
    assert after.heard == ["w", "c", "w", 3, "c", "w", "c", 6, "w", "w"]
    assert trainer.metrics["train/dl_web/samples_seen"] == 15


def test_max_steps_ends_in_the_middle() -> None:
    seen = Seen()
    quiet(hooks=[seen], max_steps=5, max_epochs=-1).fit(Net(), two(2, 1))
    assert seen.names == "wcwwc"


# ---- what is logged ----------------------------------------------------------------------------------------------------


class Talking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/mark", mark(batch), on_epoch=True, on_step=False)
        self.log("peak", mark(batch), on_epoch=True, on_step=False, reduce="max")
        return {"loss": super().training_step(batch, batch_idx), "twice": 2 * mark(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("acc", mark(batch))
        return {"loss": super().validation_step(batch, batch_idx), "mark": mark(batch)}


def test_metrics_come_for_each_loader_and_overall() -> None:
    trainer = quiet()
    metrics = trainer.fit(Talking(), two(), {"a": marked(0, 2, size=1), "b": marked(10, 1, size=4)})
    assert metrics["train/dl_web/mark"] == 102 and metrics["train/dl_code/mark"] == 201
    assert metrics["train/mark"] == pytest.approx((3 * 510 + 2 * 603) / 21)
    assert metrics["train/dl_web/twice"] == 204 and metrics["train/dl_code/twice"] == 402
    assert metrics["train/dl_web/peak"] == 104 and metrics["train/dl_code/peak"] == 202 == metrics["peak"]
    assert metrics["val/dl_a/mark"] == 0.5 == metrics["val/dl_a/acc"] and metrics["val/dl_b/mark"] == 10
    assert metrics["val/mark"] == pytest.approx((0 + 1 + 4 * 10) / 6) == metrics["acc"]
    both = 15 * metrics["train/dl_web/loss"] + 6 * metrics["train/dl_code/loss"]
    assert metrics["train/loss"] == pytest.approx(both / 21)


def test_manual_optimization_has_a_loss_for_each_loader_too() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.tensor(float(mark(batch)))

    metrics = quiet().fit(Manual(), two())
    assert (metrics["train/dl_web/loss"], metrics["train/dl_code/loss"]) == (102, 201)


def test_one_loader_has_no_metrics_of_its_own() -> None:
    metrics = quiet().fit(Talking(), {"web": marked(0, 2)}, {"a": marked(0, 2)})
    assert not [name for name in metrics if "dl_" in name]


def test_rows_tell_samples_tokens_and_proportions_reached_and_asked() -> None:
    rows = Rows()
    mixture = Mixture("weighted", {"web": 3, "code": 1}, epoch_length=8)
    trainer = quiet(hooks=[rows], log_every_n_steps=4, max_epochs=2, count_tokens=lambda batch: 7)
    trainer.fit(Net(), two(), mixture=mixture)
    steps, epochs = [rows.rows[i] for i in (0, 1, 3, 4)], [rows.rows[i] for i in (2, 5)]
    assert [row["train/dl_web/samples_seen"] for row in steps] == [9, 18, 27, 36]
    assert [row["train/dl_code/tokens_seen"] for row in steps] == [7, 14, 21, 28]
    for row in [*steps, *epochs]:
        assert (row["train/dl_web/proportion"], row["train/dl_web/proportion_asked"]) == (0.75, 0.75)
        assert (row["train/dl_code/proportion"], row["train/dl_code/proportion_asked"]) == (0.25, 0.25)
    assert epochs[1]["train/dl_web/samples_seen"] == 36


# ---- loss weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loss_weight_changes_the_gradients_and_not_the_loss_that_is_logged(accumulate: int) -> None:
    data, weights = two(), {"web": 1.0, "code": 1000.0}
    losses: list[float] = []

    class Losses(Hook):
        def on_train_batch_end(self, loss: Any) -> None:
            losses.append(float(loss))

    torch.manual_seed(3)
    trainer = quiet(hooks=[Losses()], accumulate_grad_batches=accumulate)
    trainer.fit(Net(lr=1e-4), data, mixture=Mixture(loss_weights={"code": 1000.0}))
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    streams, picks, noted = {name: iter(data[name]) for name in data}, "wcwcwcww", []
    for start in range(0, 8, accumulate):
        optimizer.zero_grad()
        window = picks[start : start + accumulate]
        for letter in window:
            name = "web" if letter == "w" else "code"
            x, y = next(streams[name])
            loss = F.mse_loss(net.layer(x), y)
            noted.append(loss.item())
            (loss / len(window) * weights[name]).backward()
        optimizer.step()
    assert losses == noted
    assert same(trainer.module.state_dict(), net.state_dict())


def test_loss_weights_of_manual_optimization_are_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(OptionError, match="loss_weights are applied before backward"):
        quiet().fit(Manual(), two(), mixture=Mixture(loss_weights={"web": 2}))


# ---- changes on the way --------------------------------------------------------------------------------------------------


class At(Hook):
    """Calls a function after some number of batches."""

    def __init__(self, when: int, do: Any) -> None:
        self.when, self.do = when, do

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.when:
            self.do(trainer)


WEIGHTED = Mixture("weighted", {"web": 1, "code": 0}, epoch_length=16, window=4)


def test_new_weights_hold_from_the_next_window_and_are_written_to_the_log(tmp_path: Path) -> None:
    seen, positions = Seen(), []
    change = At(2, lambda trainer: positions.append(trainer.loaders.set_weights({"web": 0, "code": 1})))
    trainer = quiet(hooks=[seen, change], logger=True, run_dir=tmp_path / "run", log_every_n_steps=1)
    trainer.fit(Net(), two(), mixture=WEIGHTED)
    assert positions == [4] and seen.names == "wwww" + "c" * 12
    assert trainer.loaders.weights == {"web": 0, "code": 1}
    text = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.jsonl"))
    lines = [json.loads(line) for line in text.splitlines()]
    (said,) = [line for line in lines if "weights {'web': 0, 'code': 1}" in json.dumps(line)]
    assert "from batch 4 of epoch 0 on" in json.dumps(said) and said["step"] == 2


def test_the_documented_names_do_the_same() -> None:
    seen = Seen()
    hooks = [
        seen,
        At(1, lambda trainer: trainer.loaders.update_weights({"web": 0, "code": 1})),
        At(5, lambda trainer: trainer.add_dataloader(marked(300, 2), "new", weight=1)),
        At(9, lambda trainer: trainer.loaders.rebuild_schedule(burst=2)),
    ]
    quiet(hooks=hooks).fit(Net(), two(), mixture=WEIGHTED)
    assert seen.names == "wwww" + "cccc" + "cncn" + "ccnn"


def test_a_loader_that_was_added_has_its_number_metrics_and_no_loss_weight() -> None:
    seen = Seen()
    trainer = quiet(hooks=[seen, At(1, lambda trainer: trainer.loaders.add("new", marked(300, 2)))])
    trainer.fit(Net(), two(4, 4), mixture=Mixture(window=4, loss_weights={"web": 2}))
    assert seen.names == "wcwc" + "wcnwcn"
    assert {idx for idx, name, _ in seen.batches if name == "new"} == {2}
    assert trainer.metrics["train/dl_new/samples_seen"] == 6
    assert trainer.num_batches() == {"web": 4, "code": 4, "new": 2}


@pytest.mark.parametrize(
    "mixture",
    [
        Mixture(window=4),
        Mixture("alternating", pattern=["web", "code"], window=4, epoch_length=12),
        Mixture("weighted", {"web": 1, "code": 1}, window=4, epoch_length=12),
        Mixture(window=4, loss_weights={"code": 2, "web": 3}, optimizers={"code": 0}),
    ],
    ids=shown,
)
def test_a_loader_can_be_taken_out_and_come_back(mixture: Mixture) -> None:
    seen, data = Seen(), two(10, 6)
    weight = 1.0 if mixture.weights else None

    def back(trainer: Any) -> None:
        trainer.loaders.add("code", data["code"], weight)
        if mixture.pattern:
            trainer.loaders.rebuild_schedule(pattern=["web", "code"])

    quiet(hooks=[seen, At(1, lambda trainer: trainer.loaders.remove("code")), At(6, back)]).fit(
        Net(), data, mixture=mixture
    )
    assert seen.names[:10] == "wcwc" + "wwww" + "cw" or seen.names[:10] == "wcwc" + "wwww" + "wc"
    assert [number for _, name, number in seen.batches if name == "code"][:3] == [200, 201, 202]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda loaders: loaders.set_weights({"wbe": 1}), "weights names 'wbe'"),
        (lambda loaders: loaders.set_weights({"web": 0}), "all weights are 0"),
        (lambda loaders: loaders.set_weights({"web": -1}), "web"),
        (lambda loaders: loaders.add("web", marked(0, 2), 1), "already a loader named 'web'"),
        (lambda loaders: loaders.add("new", marked(0, 2)), "'new' needs a weight"),
        (lambda loaders: loaders.add("new", [], 1), "'new' is empty"),
        (lambda loaders: loaders.add("new", Samples(), 1), "is a dataset"),
        (lambda loaders: loaders.remove("cde"), "no loader named 'cde'.*'code'"),
        (lambda loaders: loaders.remove("web"), "all weights are 0"),
        (lambda loaders: (loaders.remove("code"), loaders.remove("web")), "'web' is the only loader"),
        (
            lambda loaders: (loaders.remove("code"), loaders.add("code", [1], 1)),
            "another loader named 'code'",
        ),
        (lambda loaders: loaders.rebuild_schedule(brst=1), "no setting 'brst'.*'burst'"),
        (
            lambda loaders: loaders.rebuild_schedule(loss_weights={"web": 2}),
            "loss_weights is fixed for the whole run",
        ),
    ],
)
def test_a_wrong_change_fails_in_the_hook_that_made_it(change: Any, text: str) -> None:
    seen = Seen()

    def attempt(trainer: Any) -> None:
        with pytest.raises(OptionError, match=text):
            change(trainer.loaders)
        trainer.loaders.rebuild_schedule(
            weights={name: float(name == "web") for name in trainer.loaders.names}
        )

    quiet(hooks=[seen, At(1, attempt)]).fit(Net(), two(), mixture=WEIGHTED)
    assert seen.names == "w" * 16


def test_orders_without_weights_have_none_to_set() -> None:
    def attempt(trainer: Any) -> None:
        with pytest.raises(OptionError, match="order='round_robin' does not use weights"):
            trainer.loaders.set_weights({"web": 1})

    quiet(hooks=[At(1, attempt)]).fit(Net(), two())


# ---- resume ----------------------------------------------------------------------------------------------------------


def ended(
    data: dict[str, Any],
    hooks: list[Any],
    seed: int,
    mixture: Any,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    torch.manual_seed(seed)
    trainer = quiet(**{"max_epochs": 3, "hooks": hooks, **options})
    metrics = dict(trainer.fit(Dropping(), data, mixture=mixture, resume=resume))
    return {**trainer.module.state_dict(), "drawn next": torch.rand(3)}, metrics


def check_resume(
    make: Any,
    folder: Path,
    cuts: Sequence[int],
    mixture: Any,
    change: Any = None,
    again: Any = None,
    **options: Any,
) -> None:
    """Cut a run after these batches: each time the rest sees the same batches and ends with the same weights and metrics."""
    extra = [change] if change else []
    whole = Seen(folder, cuts)
    expected, metrics = ended(make(), [whole, *extra], 1, mixture, **options)
    assert len(whole.batches) > max(cuts)
    for cut in cuts:
        rest = Seen()
        got, numbers = ended(
            (again or make)(), [rest, *extra], 1000 + cut, mixture, folder / f"after-{cut}", **options
        )
        assert rest.batches == whole.batches[cut:], f"cut after {cut} batches"
        assert all(torch.equal(value, got[name]) for name, value in expected.items()), (
            f"cut after {cut} batches"
        )
        assert numbers == metrics


def shuffled(workers: int = 0) -> dict[str, Any]:
    """Seven, three and one batches an epoch, with random numbers drawn in the dataset."""
    noise = "python numpy torch"
    return {
        name: DataLoader(Samples(n, noise), batch_size=2, shuffle=True, num_workers=workers)
        for name, n in (("web", 13), ("code", 6), ("math", 2))
    }


THREE: list[dict[str, Any]] = [
    {"order": "sequential", "epoch_length": 14},
    {"order": "round_robin"},
    {"order": "round_robin", "epoch_length": 12, "burst": 2},
    {"order": "alternating", "pattern": ["web", "code", "code", "math"], "epoch_length": "max"},
    {"order": "weighted", "weights": {"web": 3, "code": 5, "math": 2}, "epoch_length": 13},
    {"order": "random", "weights": {"web": 3, "code": 5, "math": 2}, "epoch_length": 13},
    {"order": "random", "when_exhausted": "end", "window": 3},
]


@pytest.mark.parametrize(
    ("settings", "accumulate"),
    some(
        [*((each, 1) for each in THREE), (THREE[1], 4), (THREE[4], 4)],
        ((each, 4) for each in THREE if each not in (THREE[1], THREE[4])),
    ),
    ids=shown,
)
def test_a_resumed_run_sees_the_same_batches_of_the_same_loaders(
    settings: Any, accumulate: int, tmp_path: Path
) -> None:
    check_resume(
        shuffled,
        tmp_path,
        some((2, 11, 13, 17), (1, 5, 6, 12)),
        Mixture(**settings),
        accumulate_grad_batches=accumulate,
    )


def test_a_loader_with_workers_can_be_cut_in_its_second_pass(tmp_path: Path) -> None:
    mixture = Mixture("weighted", {"web": 1, "code": 4, "math": 1}, epoch_length=12)
    check_resume(lambda: shuffled(1), tmp_path, (5, 14), mixture, max_epochs=2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"order": "sequential", "epoch_length": 14},
        {"order": "weighted", "weights": {"web": 1, "code": 4}, "epoch_length": 9},
    ],
    ids=shown,
)
def test_generators_of_the_loaders_own_are_taken_up(settings: Any, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {
            name: DataLoader(
                Samples(n), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
            )
            for name, n in (("web", 13), ("code", 6))
        }

    check_resume(make, tmp_path, some((6, 9, 10, 14), (3, 8, 17)), Mixture(**settings))


@pytest.mark.parametrize(
    "settings", [{"order": "round_robin"}, {"order": "random"}, {"order": "sequential"}], ids=shown
)
def test_streams_of_unknown_length_are_resumed_too(settings: Any, tmp_path: Path) -> None:
    class Stream:
        def __init__(self, first: int, n: int) -> None:
            self.first, self.n = first, n

        def __iter__(self) -> Iterator[Batch]:
            for x, y in marked(self.first, self.n):
                yield x + torch.rand(()), y

    def make() -> dict[str, Any]:
        return {"code": marked(0, 4), "web": Stream(100, 3)}

    cuts = some((4, 7, 13), (1, 8))
    check_resume(make, tmp_path, cuts, Mixture(**settings, epoch_length=9, when_exhausted="cycle"))
    check_resume(
        make,
        tmp_path / "end",
        [each for each in cuts if each < 8],
        Mixture(**settings, epoch_length=9, when_exhausted="end"),
    )


def test_a_loader_that_can_say_where_it_is_is_taken_at_its_word(tmp_path: Path) -> None:
    class Stateful:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[Batch]:
            while self.at < 5:
                self.at += 1
                yield marked(100 + self.at, 1)[0]
            self.at = 0

        def __len__(self) -> int:
            return 5

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def make() -> dict[str, Any]:
        return {"web": Stateful(), "code": marked(0, 3)}

    check_resume(make, tmp_path, some((1, 8, 9, 17), (2, 5, 11)), Mixture())


@pytest.mark.parametrize("order", ["weighted", "random"])
@pytest.mark.parametrize(
    "change",
    [
        lambda loaders: loaders.set_weights({"web": 1, "math": 7}),
        lambda loaders: loaders.remove("code"),
        lambda loaders: loaders.rebuild_schedule(burst=2, epoch_length=15),
    ],
    ids=["weights", "remove", "rebuild"],
)
def test_a_change_made_by_a_hook_is_in_the_checkpoint(order: Any, change: Any, tmp_path: Path) -> None:
    mixture = Mixture(order, {"web": 3, "code": 5, "math": 2}, epoch_length=12, window=3)
    cuts = some((4, 6, 13), (5, 7, 12, 20))
    check_resume(shuffled, tmp_path, cuts, mixture, At(4, lambda trainer: change(trainer.loaders)))


@pytest.mark.parametrize("order", ["weighted", "random"])
def test_a_loader_that_was_added_must_be_there_again_and_then_the_resume_is_exact(
    order: Any, tmp_path: Path
) -> None:
    new = {"new": marked(300, 4)}
    mixture = Mixture(order, {"web": 3, "code": 5}, epoch_length=12, window=3)
    larger = Mixture(order, {"web": 3, "code": 5, "new": 4}, epoch_length=12, window=3)
    cuts = (4, 7, 13)
    whole = Seen(tmp_path, cuts)
    expected, metrics = ended(
        two(), [whole, At(2, lambda trainer: trainer.loaders.add("new", new["new"], 4))], 1, mixture
    )

    class Again(Hook):
        def on_train_start(self, trainer: Any, resumed: bool) -> None:
            assert resumed
            trainer.loaders.add("new", new["new"], 4)

    for cut in cuts:
        for data, hooks, settings in (({**new, **two()}, [], larger), (two(), [Again()], mixture)):
            rest = Seen()
            got, numbers = ended(data, [rest, *hooks], 7, settings, tmp_path / f"after-{cut}")
            assert rest.batches == whole.batches[cut:] and numbers == metrics
            assert all(torch.equal(value, got[name]) for name, value in expected.items())
    with pytest.raises(
        CheckpointError, match="uses the training loaders 'new', but this run has only 'web', 'code'"
    ):
        ended(two(), [], 7, mixture, tmp_path / "after-7")


def test_other_settings_after_a_resume_hold_from_the_next_window(tmp_path: Path) -> None:
    ended(two(), [Seen(tmp_path, (5,))], 1, WEIGHTED, max_epochs=1)
    rest = Seen()
    ended(
        two(),
        [rest],
        1,
        Mixture("weighted", {"web": 0, "code": 1}, epoch_length=16, window=4),
        tmp_path / "after-5",
        max_epochs=1,
    )
    assert rest.names == "www" + "c" * 8


def test_a_batch_whose_step_failed_comes_again_after_the_resume(tmp_path: Path) -> None:
    class Failing(Net):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and batch_idx == 4:
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    class Rescue(Hook):
        def on_exception(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "rescue", reason="exception")

    whole, first, rest = Seen(), Seen(), Seen()
    mixture = Mixture("random", {"web": 1, "code": 1}, epoch_length=12)
    expected = quiet(hooks=[whole]).fit(Net(), two(), mixture=mixture)
    with pytest.raises(RuntimeError, match="out of memory"):
        quiet(hooks=[first, Rescue()]).fit(Failing(), two(), mixture=mixture)
    module = Failing()
    module.fails = False
    metrics = quiet(hooks=[rest]).fit(module, two(), mixture=mixture, resume=tmp_path / "rescue")
    assert first.batches + rest.batches == whole.batches and len(first.batches) == 4
    counted = [name for name in expected if "seen" in name or "proportion" in name]
    assert counted and {name: metrics[name] for name in counted} == {name: expected[name] for name in counted}


def test_validation_comes_at_the_same_batches_after_a_resume_whatever_became_of_the_epochs_length(
    tmp_path: Path,
) -> None:
    class Validated(Hook):
        def __init__(self) -> None:
            self.at: list[int] = []

        def on_validation_end(self, batches_seen: int) -> None:
            self.at.append(batches_seen)

    def fit(resume: Path | None = None, cuts: tuple[int, ...] = ()) -> list[int]:
        validated = Validated()
        hooks = [Seen(tmp_path, cuts), validated, At(3, lambda trainer: trainer.loaders.remove("code"))]
        trainer = quiet(hooks=hooks, val_check_interval=0.5, max_epochs=3)
        trainer.fit(Net(), two(8, 8), marked(0, 1), mixture=Mixture(window=4), resume=resume)
        return validated.at

    whole = fit(cuts=(2, 5, 12, 20))
    for cut in (2, 5, 12, 20):
        assert fit(tmp_path / f"after-{cut}") == [at for at in whole if at > cut], f"cut after {cut}"


def test_a_checkpoint_of_one_loader_does_not_fit_several(tmp_path: Path) -> None:
    quiet(hooks=[Seen(tmp_path, (2,))]).fit(Net(), marked(0, 4))
    with pytest.raises(OptionError, match="saved with one training loader"):
        quiet().fit(Net(), two(), resume=tmp_path / "after-2")
