"""Whatever falls inside an accumulation window of mixed loaders: the run equals, bit for bit, the loop written by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Net, quiet
from torch import Tensor
from torch.nn import functional as F

from hookline import END_EPOCH, SKIP_BATCH, Hook, LossError, Mixture
from hookline.data.mixing import schedule

TRAIN, SKIP, NONE, END = "train", "skip", "none", "end"
MIXTURES = st.one_of(
    st.builds(Mixture, st.sampled_from(["round_robin", "sequential"])),
    st.builds(
        lambda web, length, burst: Mixture(
            "weighted", {"web": web, "code": 1.0}, burst=burst, epoch_length=length
        ),
        st.floats(0.2, 5.0),
        st.integers(1, 9),
        st.integers(1, 3),
    ),
    st.builds(
        lambda seed, length: Mixture("random", seed=seed, epoch_length=length),
        st.integers(0, 99),
        st.integers(1, 9),
    ),
)


def loader(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(2, 4, generator=generator), torch.randn(2, 2, generator=generator)) for _ in range(n)
    ]


class Odd(Net):
    """Has no loss at some batches."""

    deeds: list[str]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (
            None
            if self.deeds[batch_idx % len(self.deeds)] == NONE
            else super().training_step(batch, batch_idx)
        )


class Steers(Hook):
    def __init__(self, deeds: list[str]) -> None:
        super().__init__()
        self.deeds = deeds

    def on_train_batch_start(self, batch_idx: int) -> Any:
        return {SKIP: SKIP_BATCH, END: END_EPOCH}.get(self.deeds[batch_idx % len(self.deeds)])


def by_hand(
    net: Odd, data: dict[str, list[Any]], mixture: Mixture, epochs: int, accumulate: int, deeds: list[str]
) -> int:
    """The same batches in plain PyTorch; returns the number of updates."""
    optimizer, lengths, names = (
        net.configure_optimizers(),
        {name: len(each) for name, each in data.items()},
        list(data),
    )
    updates = 0
    for epoch in range(epochs):
        picks = list(schedule(mixture, lengths, epoch))
        streams = {name: iter(each) for name, each in data.items()}
        size = batches = used = 0

        def update(size: int, used: int) -> int:
            if used and used != size:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= size / used
            if used:
                optimizer.step()
            return int(used > 0)

        for index, pick in enumerate(picks):
            name = names[pick.loader]
            batch = next(streams[name], None)
            if batch is None:
                streams[name] = iter(data[name])
                batch = next(streams[name])
            deed = deeds[index % len(deeds)]
            if deed == END:
                break
            size = size if batches else min(accumulate, len(picks) - index)
            if deed == TRAIN:
                if not used:
                    optimizer.zero_grad()
                loss = F.mse_loss(net.layer(batch[0]), batch[1])
                (loss if size == 1 else loss / size).backward()
                used += 1
            batches += 1
            if batches == size:
                updates += update(size, used)
                batches = used = 0
        updates += update(size, used)
    return updates


@settings(max_examples=60, deadline=None)
@given(
    mixture=MIXTURES,
    web=st.integers(1, 5),
    code=st.integers(1, 4),
    epochs=st.integers(1, 2),
    accumulate=st.integers(1, 4),
    deeds=st.lists(st.sampled_from([TRAIN, TRAIN, TRAIN, SKIP, NONE, END]), min_size=1, max_size=9),
)
def test_skipped_batches_missing_losses_and_ended_epochs_inside_a_window(
    mixture: Mixture, web: int, code: int, epochs: int, accumulate: int, deeds: list[str]
) -> None:
    data = {"web": loader(web, 1), "code": loader(code, 2)}
    mine, theirs = Odd(), Odd()
    mine.deeds = theirs.deeds = deeds
    theirs.load_state_dict(mine.state_dict())
    trainer = quiet(max_epochs=epochs, accumulate_grad_batches=accumulate, hooks=[Steers(deeds)])
    with contextlib.suppress(LossError):  # no batch had a loss
        trainer.fit(mine, data, mixture=mixture)
    assert by_hand(theirs, data, mixture, epochs, accumulate, deeds) == trainer.global_step
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, mine.state_dict()[name]), name
