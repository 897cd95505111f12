"""One result from those of several evaluation loaders, as chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, OptionError
from hookline.hooks import EarlyStopping, ModelCheckpoint


def of(value: float, n: int, size: int) -> list[Any]:
    return [(torch.full((size, 4), value), torch.zeros(size, 2)) for _ in range(n)]


LOADERS = {"small": of(1.0, 1, 2), "large": of(4.0, 5, 2), "odd": of(10.0, 2, 4)}
MICRO = (1 * 2 + 4 * 10 + 10 * 8) / 20


class Measuring(Net):
    """Its metrics are the numbers in the data."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        value = batch[0][0, 0]
        self.log("val/logged", value * 2)
        self.log("bare", value * 3)
        return {"loss": value, "twice": value * 2}

    test_step = validation_step


def weighted(results: dict[str, dict[str, float]]) -> dict[str, float]:
    assert results["large"] == {"loss": 4.0, "twice": 8.0, "logged": 8.0, "bare": 12.0}
    return {"loss": 0.5 * results["small"]["loss"] + 0.5 * results["odd"]["loss"], "bare": 1.0}


@pytest.mark.parametrize(
    ("how", "loss"),
    [("micro", MICRO), ("macro", 5.0), ("primary", 1.0), ("primary:odd", 10.0), (weighted, 5.5)],
)
@pytest.mark.parametrize("verb", ["validate", "fit"])
def test_the_result_overall_is_made_as_chosen(how: Any, loss: float, verb: str) -> None:
    trainer = quiet(evaluation={"aggregation": how})
    metrics = (
        trainer.fit(Measuring(), batches(1), LOADERS)
        if verb == "fit"
        else trainer.validate(Measuring(), LOADERS)
    )
    assert metrics["val/loss"] == pytest.approx(loss)
    assert [metrics[f"val/dl_{name}/loss"] for name in LOADERS] == [1, 4, 10]
    if callable(how):
        assert metrics["bare"] == 1.0 and metrics["val/twice"] == pytest.approx(2 * MICRO), (
            "what it leaves out stays"
        )
    else:
        assert [metrics["val/twice"], metrics["val/logged"]] == pytest.approx([2 * loss] * 2)
        assert metrics["bare"] == pytest.approx(3 * loss)


def test_it_holds_for_test_too() -> None:
    assert quiet(evaluation={"aggregation": "macro"}).test(Measuring(), LOADERS)[
        "test/loss"
    ] == pytest.approx(5)


def test_one_loader_is_nothing_to_aggregate() -> None:
    def never(results: Any) -> Any:
        raise AssertionError

    assert (
        quiet(evaluation={"aggregation": never}).validate(Measuring(), {"small": LOADERS["small"]})[
            "val/loss"
        ]
        == 1
    )
    assert (
        quiet(evaluation={"aggregation": "primary:odd"}).validate(Measuring(), LOADERS["small"])["val/loss"]
        == 1
    )


@pytest.mark.parametrize(
    "val", [batches(1), {"web": batches(1)}], ids=["without a name", "with another name"]
)
@pytest.mark.parametrize("sanity", [0, 2])
def test_a_primary_loader_that_is_not_there_is_refused_before_training_also_if_there_is_only_one(
    val: Any, sanity: int
) -> None:
    trainer = quiet(evaluation={"aggregation": "primary:webb"}, num_sanity_val_steps=sanity)
    with pytest.raises(OptionError, match="there is no loader named 'webb'.* Loaders: (val|web)"):
        trainer.fit(Net(), batches(1), val)
    assert trainer.state.batches_seen == 0


def test_a_primary_loader_needs_a_name() -> None:
    with pytest.raises(
        OptionError, match="aggregation='primary:', allowed: 'micro', 'macro', 'primary', 'primary:NAME'"
    ):
        quiet(evaluation={"aggregation": "primary:"})


def test_every_batch_of_every_loader_is_measured_once_whatever_their_lengths() -> None:
    class Counts(Hook):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, int]] = []

        def on_validation_batch_end(self, dataloader_name: str, dataloader_idx: int, batch_idx: int) -> None:
            self.seen.append((dataloader_name, dataloader_idx, batch_idx))

    counts = Counts()
    quiet(hooks=[counts]).fit(Measuring(), batches(1), LOADERS)
    assert counts.seen == [
        (name, number, index)
        for number, (name, data) in enumerate(LOADERS.items())
        for index in range(len(data))
    ]


def test_stopping_early_and_keeping_the_best_go_by_the_aggregated_value(tmp_path: Any) -> None:
    class Worse(Measuring):
        """The loader that counts gets worse in every epoch; the mean over all samples gets better."""

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer is not None
            epoch = self.trainer.current_epoch
            return (
                batch[0][0, 0] + epoch
                if len(batch[0]) == 2 and batch[0][0, 0] == 1
                else batch[0][0, 0] - 10.0 * epoch
            )

    def fit(how: Any) -> tuple[int, Any]:
        keep = ModelCheckpoint("val/loss", save_top_k=1)
        trainer = quiet(
            hooks=[EarlyStopping("val/loss", patience=2), keep],
            max_epochs=6,
            evaluation={"aggregation": how},
            run_dir=tmp_path / how,
        )
        trainer.fit(Worse(), batches(1), LOADERS)
        return trainer.state.epochs_seen, keep.best_model_score

    assert fit("primary") == (3, 1.0)
    epochs, best = fit("micro")
    assert epochs == 6 and best < -30


def test_a_loader_that_is_not_there_is_refused_before_anything_is_trained_or_measured() -> None:
    class Never(Measuring):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError

        validation_step = training_step

    with pytest.raises(
        OptionError, match=r"no loader named 'od'. Did you mean 'odd'\? Loaders: small, large, odd"
    ):
        quiet(evaluation={"aggregation": "primary:od"}).fit(Never(), batches(1), LOADERS)
    with pytest.raises(OptionError, match="no loader named 'od'"):
        quiet(evaluation={"aggregation": "primary:od"}).validate(Never(), LOADERS)
    with pytest.raises(OptionError, match="aggregation='mcro'"):
        quiet(evaluation={"aggregation": "mcro"})


@pytest.mark.parametrize("made", [3.0, {"loss": "low"}, {"loss": torch.ones(2)}, None])
def test_a_function_must_return_numbers_by_name(made: Any) -> None:
    with pytest.raises(OptionError, match="must return a dictionary of numbers"):
        quiet(evaluation={"aggregation": lambda results: made}).validate(Measuring(), LOADERS)


def test_an_empty_validation_loader_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    metrics = quiet(evaluation={"aggregation": "macro"}).validate(Measuring(), {**LOADERS, "none": []})
    assert metrics["val/loss"] == pytest.approx(5) and "'none' is empty" in caplog.text
