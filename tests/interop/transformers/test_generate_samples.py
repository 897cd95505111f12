"""Samples of models of transformers, generated while they train: text by a tokenizer, and nothing is disturbed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.transformers.made import batches, causal, tokenizer
from tiny import quiet
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hookline import Module, OptionError
from hookline.hooks import GenerateSamples
from hookline.loggers import read_log


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=16))


def fit(model: nn.Module, *hooks: Any, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    quiet(hooks=hooks, seed=1, max_epochs=2, **options).fit(model, batches(), batches(2), optimizer=optimizer)


@pytest.mark.parametrize("make", [gpt2, causal])
def test_a_language_model_writes_at_each_validation_and_trains_as_without_it(
    make: Any, tmp_path: Path
) -> None:
    plain, model, words = make(), make(), tokenizer()
    fit(plain)
    before = copy.deepcopy(model.generation_config.to_dict())
    hook = GenerateSamples(
        ["w1 w2", "w3"], tokenizer=words, options={"max_new_tokens": 5, "do_sample": True, "top_k": 4}
    )
    fit(model, hook, run_dir=str(tmp_path))
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert model.generation_config.to_dict() == before and model.training
    found = [each for each in read_log(tmp_path / "samples.jsonl") if each["type"] == "sample"]
    assert [each["prompt"] for each in found] == ["w1 w2", "w3"] * 2
    assert all(each["text"].startswith(each["prompt"]) for each in found)
    assert any(len(each["text"]) > len(each["prompt"]) for each in found)
    assert hook.latest == [each["text"] for each in found[2:]]


class Wrapped(Module):
    """A model of transformers as a part of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.words = gpt2(), tokenizer()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_part_of_a_module_generates_from_texts_and_from_tokens() -> None:
    texts = GenerateSamples("w1", tokenizer="words", options={"max_new_tokens": 3}, every=4)
    rows = torch.tensor([[5, 6]])
    tokens = GenerateSamples(rows, options={"max_new_tokens": 3, "pad_token_id": 1}, every=4, tag="tokens")
    quiet(hooks=[texts, tokens]).fit(Wrapped(), batches())
    assert texts.latest[0].startswith("w1") and tokens.latest[0].startswith("5 6 ")
    assert len(tokens.latest[0].split()) == 5


def test_wrong_options_and_missing_tokenizers_are_refused_before_the_first_step() -> None:
    def refuses(text: str, **given: Any) -> None:
        trainer = quiet(hooks=[GenerateSamples(**{"prompts": "w1", "every": 1, **given})])
        with pytest.raises(OptionError, match=text):
            trainer.fit(Wrapped(), batches())
        assert trainer.global_step == 0

    refuses("the prompts are texts, and Wrapped.net takes tokens: pass tokenizer=")
    refuses("Did you mean 'max_new_tokens'", tokenizer="words", options={"max_new_token": 3})
