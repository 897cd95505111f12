"""Fine-tune a transformers model with LoRA (peft), and save it in the format of transformers.

So that nothing is downloaded, the base model and its tokenizer are made here, from Python's help texts. With
a model of the hub, leave `make_base` out: `AutoModelForCausalLM.from_pretrained("name")`. The adapter learns
the style of Python source code. `python examples/finetune_lora/finetune_lora.py`
"""

from __future__ import annotations

import argparse
import inspect
import shlex
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from hookline import Trainer, seed_everything
from hookline.hooks import ExportPretrained, ModelCheckpoint

LENGTH, VOCABULARY = 64, 400


def make_loader(tokenizer: PreTrainedTokenizerFast, texts: list[str], shuffle: bool) -> Any:
    """Return batches with `input_ids` and `labels`."""
    ids = [code for text in texts for code in tokenizer(text)["input_ids"]]
    rows = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)]
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    return DataLoader(data, 16, shuffle=shuffle, collate_fn=default_data_collator)


def make_base(folder: Path, steps: int) -> None:
    """Train a tokenizer and a small model, and save both."""
    texts = list(topics.values())
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>", pad_token="<end>")
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 96, "n_layer": 2, "n_head": 4}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(max_steps=steps, logger=False, enable_progress_bar=False)
    train = make_loader(tokenizer, texts, shuffle=True)
    trainer.fit(model, train, optimizer=AdamW(model.parameters(), lr=5e-3))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Fine-tune, then load what was saved as any program that uses transformers would."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/lora"))
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    seed_everything(0)
    base = options.run_dir / "base"
    make_base(base, options.steps)

    tokenizer = AutoTokenizer.from_pretrained(base)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    train = make_loader(tokenizer, [inspect.getsource(each) for each in (argparse, inspect)], shuffle=True)
    val = make_loader(tokenizer, [inspect.getsource(shlex)], shuffle=False)

    trainer = Trainer(
        max_steps=options.steps,
        val_check_interval=options.steps // 8,
        run_dir=options.run_dir / "adapter",
        hooks=[
            ModelCheckpoint(monitor="val/loss", weights="trainable"),  # without the frozen base
            ExportPretrained(tokenizer),
        ],
        enable_progress_bar=False,
    )
    before = trainer.validate(model, val)["val/loss"]
    optimizer = AdamW((each for each in model.parameters() if each.requires_grad), lr=5e-3)
    after = trainer.fit(model, train, val, optimizer=optimizer)["val/loss"]
    trained, total = model.get_nb_trainable_parameters()
    print(f"{trained:,} of {total:,} weights trained; loss on source code {before:.3f} -> {after:.3f}")

    exported = options.run_dir / "adapter" / "pretrained" / "best"
    adapted = AutoPeftModelForCausalLM.from_pretrained(exported)  # the base with the adapter
    adapted.merge_and_unload().save_pretrained(options.run_dir / "merged")
    merged = AutoModelForCausalLM.from_pretrained(options.run_dir / "merged")  # needs no peft
    trainer.load_best()
    batch = tokenizer("def main(", return_tensors="pt")
    with torch.inference_mode():
        logits = [each.eval()(**batch).logits for each in (model, adapted, merged)]
    print(f"loaded adapter: the same logits: {torch.allclose(logits[0], logits[1], atol=1e-4)}")
    print(f"merged model: the same logits: {torch.allclose(logits[0], logits[2], atol=1e-4)}")


if __name__ == "__main__":
    main()
