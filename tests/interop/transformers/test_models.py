"""Models of transformers without glue code: dictionary batches, `ModelOutput`, gradient checkpointing, collators."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.transformers.made import batches, causal, logits, masked, tokenizer
from tiny import quiet
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForLanguageModeling, DataCollatorWithPadding

from hookline import Hook, OptionError


def optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture(scope="module")
def by_hand() -> Any:
    """The same model, trained by a loop of four lines."""
    model = causal()
    update = optimizer(model)
    torch.manual_seed(1)
    for batch in batches():
        model(**batch).loss.backward()
        update.step()
        update.zero_grad()
    return model


@pytest.mark.parametrize("kind", [dict, BatchEncoding, UserDict])
def test_batches_that_are_mappings_train_the_same_weights_as_a_plain_loop(kind: Any, by_hand: Any) -> None:
    model, trainer = causal(), quiet()
    torch.manual_seed(1)
    data = [kind(each) for each in batches()]
    trainer.fit(model, data, data, optimizer=optimizer(model))
    assert same(model, by_hand)
    by_hand.eval()
    with torch.no_grad():
        losses = [by_hand(**each).loss.item() for each in batches()]
    assert trainer.metrics["val/loss"] == pytest.approx(sum(losses) / len(losses))
    predicted = trainer.predict(model, data)
    assert torch.equal(torch.cat([each.logits for each in predicted]), logits(by_hand))


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_models_own_gradient_checkpointing_trains_the_same_weights(reentrant: bool, by_hand: Any) -> None:
    model, recomputed = causal(), []
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    first: Any = model.model.layers[0].input_layernorm
    first.register_forward_hook(lambda *_: recomputed.append(True))
    torch.manual_seed(1)
    quiet().fit(model, batches(), optimizer=optimizer(model))
    assert same(model, by_hand)
    assert len(recomputed) == 2 * len(batches())  # forward, and again in backward


def test_batches_without_labels_are_explained() -> None:
    model = causal()
    data = [{"input_ids": each["input_ids"]} for each in batches()]
    said = "LlamaForCausalLM returned no loss, but CausalLMOutputWithPast with logits.* batch with input_ids.*labels"
    with pytest.raises(OptionError, match=said):
        quiet().fit(model, data, optimizer=optimizer(model))


def test_a_padding_collator_and_counts_of_samples_and_tokens() -> None:
    words, model = tokenizer(), causal()
    rows = [words(" ".join(["w1"] * length)) for length in (2, 3, 4, 1)]
    for row in rows:
        row["labels"] = row["input_ids"][:1] * 1

    def collate(samples: list[Any]) -> Any:
        batch = DataCollatorWithPadding(words)(
            [{key: each[key] for key in ("input_ids", "attention_mask")} for each in samples]
        )
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    counts: list[tuple[int, int]] = []

    class Counts(Hook):
        def on_train_batch_end(self, samples_seen: int, tokens_seen: int, batch: Any) -> None:
            assert isinstance(batch, BatchEncoding)
            counts.append((samples_seen, tokens_seen))

    quiet(hooks=[Counts()]).fit(model, DataLoader(rows, 2, collate_fn=collate), optimizer=optimizer(model))  # type: ignore[arg-type]
    assert counts == [(2, 6), (4, 14)]  # with padding: 2 × 3, then 2 × 4


class Cuts(Hook):
    """Keeps the tokens of each batch, and saves after one of them."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.tokens = path, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, batch: Any, batches_seen: int) -> None:
        self.tokens.append(batch["input_ids"].tolist())
        if self.path is not None and batches_seen == 5:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("seed", [None, 3], ids=["seeded by the run", "with a seed of its own"])
def test_the_random_masks_of_a_collator_are_those_of_a_run_that_was_not_interrupted(
    seed: int | None, tmp_path: Path
) -> None:
    words = tokenizer()
    rows = [words(" ".join(f"w{(start + step) % 20}" for step in range(8))) for start in range(8)]

    def run(cuts: Cuts, drawn: int, resume: Path | None = None) -> Any:
        collate = DataCollatorForLanguageModeling(words, mlm_probability=0.5, seed=seed)
        loader: Any = DataLoader(rows, 2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
        model = masked(len(words))
        torch.manual_seed(drawn)
        quiet(max_epochs=2, hooks=[cuts]).fit(model, loader, optimizer=optimizer(model), resume=resume)
        return model

    whole, rest = Cuts(tmp_path / "cut"), Cuts()
    expected = run(whole, 1)
    found = run(rest, 2, tmp_path / "cut")
    assert rest.tokens == whole.tokens[5:]
    assert same(found, expected)


def test_a_collator_with_a_seed_in_workers_is_reported() -> None:
    from hookline.data.loaders import make_loaders
    from hookline.data.sources import resume_limits

    collate = DataCollatorForLanguageModeling(tokenizer(), seed=3)
    loader: Any = DataLoader([1], num_workers=1, collate_fn=collate)  # type: ignore[arg-type]
    (limit,) = resume_limits(make_loaders(loader, 1.0, "train")[0])
    assert "DataCollatorForLanguageModeling(seed=...)" in limit
    assert "Leave out seed: " in limit
    assert collate.generator is None
