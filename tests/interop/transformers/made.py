"""Tiny models and a tokenizer of transformers, made on the spot: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(20)]


def tokenizer() -> Any:
    """A tokenizer of whole words, trained on the spot."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<mask>"]
    made.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", mask_token="<mask>"
    )


def causal(seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    """A causal language model with two layers."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            tie_word_embeddings=tied,
            attention_dropout=0.1,
        )
    )


def masked(vocabulary: int) -> BertForMaskedLM:
    """A masked language model with one layer and dropout."""
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
            max_position_embeddings=16,
        )
    )


def tokens(count: int = 8, length: int = 6) -> Tensor:
    """Random tokens, the same every time."""
    return torch.randint(0, 32, (count, length), generator=torch.Generator().manual_seed(0))


def batches(count: int = 4, size: int = 2) -> list[dict[str, Tensor]]:
    """Batches for a causal language model."""
    return [
        {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each}
        for each in tokens(count * size).split(size)
    ]


def logits(model: Any) -> Tensor:
    """What a model says to all tokens, in eval mode."""
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens()).logits
    return found
