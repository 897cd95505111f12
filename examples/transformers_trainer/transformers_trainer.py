"""Keep the Trainer of transformers, and add Hookline's hooks to it.

The model learns to continue sequences of numbers; nothing is downloaded.
`python examples/transformers_trainer/transformers_trainer.py`
"""

from __future__ import annotations

import argparse

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import hookline
from hookline import Hook, Metrics, every
from hookline.hooks import EarlyStopping


class Report(Hook):
    """Prints the gradient norm before clipping, and the layer with the largest gradient; transformers'
    callbacks cannot see gradients.
    """

    @every("25 steps")
    def on_before_optimizer_step(self, model: torch.nn.Module, step: int, grad_norm: float) -> None:
        norms = {
            name: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None
        }
        largest = max(norms, key=lambda name: norms[name])
        print(f"step {step:3}   gradient norm {grad_norm:.3f}   largest: {largest}")

    def on_validation_end(self, step: int, metrics: Metrics) -> None:
        print(f"step {step:3}   validation loss {metrics['val/loss']:.4f}")


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences that begin anywhere and rise by the same number, modulo 50."""
    first, rise = torch.randint(50, (count, 1)), torch.randint(1, 5, (count, 1))
    rows = (first + rise * torch.arange(16)) % 50
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train with transformers' Trainer until the loss is low."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output-dir", default="runs/transformers")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    # the first two numbers are free: log(50) + log(4) nats of 15 predictions are the lowest mean loss, 0.35
    hooks = [Report(), EarlyStopping("val/loss", patience=2, stopping_threshold=0.4)]
    callback = hookline.hosts.transformers(hooks)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=sequences(2000),
        eval_dataset=sequences(200),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)  # only the hooks print here
    with callback:
        trainer.train()
    print(f"{callback.line.status} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
