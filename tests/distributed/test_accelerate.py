"""The strategy of Hugging Face Accelerate, on one process."""

from __future__ import annotations

import pytest

from hookline import Accelerated, OptionError


def test_an_accelerator_of_the_users_own_is_used() -> None:
    accelerate = pytest.importorskip("accelerate")
    from tiny import Net, batches, quiet

    accelerator = accelerate.Accelerator(cpu=True)
    strategy = Accelerated(accelerator)
    trainer = quiet(strategy=strategy)
    trainer.fit(Net(), batches())
    assert strategy.accelerator is accelerator
    assert type(trainer.state.optimizers[0]).__name__ == "AcceleratedOptimizer"
    accelerator.gradient_accumulation_steps = 4
    with pytest.raises(OptionError, match=r"gradient_accumulation_steps \(4\) at 1"):
        Accelerated(accelerator)
