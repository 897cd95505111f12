"""A run that fails at a batch says which one, and the state has this batch afterwards: also in an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, Trainer


class Fails(Net):
    """Fails at the second batch of an evaluation."""

    def _fail(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ValueError("on purpose")
        return super().validation_step(batch, batch_idx)

    validation_step = test_step = predict_step = _fail


def fail(stage: str, **loaders: Any) -> tuple[Trainer, str]:
    trainer = quiet()
    with pytest.raises(ValueError, match="on purpose") as caught:
        getattr(trainer, stage)(Fails(), *loaders.values())
    return trainer, "\n".join(caught.value.__notes__)


def test_a_validation_in_a_fit_says_its_batch_and_the_state_has_it() -> None:
    data = batches(3)
    trainer, notes = fail("fit", train=batches(4), val={"a": data[:1], "b": data})
    assert notes.count("epoch 0, batch 3, step 4, validation batch 1 of loader 'b', rank 0.") == 1
    assert notes.count("batch 3") == 1
    assert torch.equal(trainer.state.batch[0], data[1][0])
    assert trainer.state.batch_idx == 1 and trainer.state.dataloader_name == "b"


@pytest.mark.parametrize(
    ("stage", "word"), [("validate", "validation"), ("test", "test"), ("predict", "prediction")]
)
def test_the_other_stages_say_it_too(stage: str, word: str) -> None:
    data = batches(3)
    trainer, notes = fail(stage, loaders=data)
    assert f"the run ended in {stage} at {word} batch 1" in notes
    with pytest.raises(OptionError) as refused:
        getattr(quiet(), stage)(Fails())  # without a loader
    assert getattr(refused.value, "__notes__", []) == []
    assert torch.equal(trainer.state.batch[0], data[1][0])


def test_a_failed_validation_that_a_hook_survives_leaves_the_batch_of_the_training() -> None:
    class Validates(Hook):
        on_error = "warn"

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.validate()

    class Watches(Hook):
        seen: list[tuple[int, str]] = []

        def on_train_batch_end(self, batch_idx: int, state: Any) -> None:
            self.seen.append((batch_idx, state.position))

    watches = Watches()
    trainer = quiet(hooks=[Validates(), watches])
    module = Fails()
    with pytest.raises(ValueError, match="on purpose"):  # the validation at the end of the epoch
        trainer.fit(module, batches(4), batches(2))
    assert watches.seen == [(n, f"epoch 0, batch {n}, step {n + 1}") for n in range(4)]
