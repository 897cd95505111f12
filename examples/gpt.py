"""Train a small GPT, character by character, on the texts behind Python's `help()`, and see what its hooks do.

About a minute on two CPU cores: `python3 dev.py demo`, or `python examples/gpt.py --steps 100` for a first look.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hookline import Hook, Metrics, Module, Trainer, every

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 128, 4, 4


class Block(nn.Module):
    """Each character gathers what it needs from those before it, then works on it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        split = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each: batch, head, position, channel
        gathered = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(gathered.transpose(1, 2).flatten(-2))
        worked_on: Tensor = self.mlp(self.norm2(x))
        return x + worked_on


class GPT(Module):
    """Predicts the next character. A `hookline.Module` is a model together with how it is trained."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.character, self.position):
            nn.init.normal_(embedding.weight, std=0.02)  # torch's default of 1 learns far more slowly here
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.blocks(self.character(text) + self.position(positions)))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        text = batch[0]
        return cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)  # its mean over the validation data becomes `val/loss`

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.1)
        steps: float = self.trainer.estimated_stepping_batches
        warmup = max(1.0, steps / 10)

        def factor(step: int) -> float:  # a straight line up, then a cosine down to a tenth
            decay = max(0.0, step - warmup) / max(1.0, steps - warmup)
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * decay))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    @torch.no_grad()
    def write(self, text: Tensor, length: int, temperature: float = 0.8) -> Tensor:
        """Go on with a text of shape (1, n)."""
        for _ in range(length):
            logits = self(text[:, -CONTEXT:])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return text


class WatchGradients(Hook):
    """Logs the gradient norm and says which layer leads. Methods name events, their parameters the facts they want."""

    leader = ""

    @every("50 steps")
    def on_step_end(self, trainer: Trainer, module: GPT, step: int, grad_norm: float) -> None:
        trainer.log("grad_norm", grad_norm)
        norms = {name: float(p.grad.norm()) for name, p in module.named_parameters() if p.grad is not None}
        leader = max(norms, key=lambda name: norms[name])
        if leader != self.leader:
            print(f"step {step:4}   largest gradient: {leader}")
            self.leader = leader


def show_costs(trainer: Trainer, seconds: float) -> None:
    """Hookline counts the calls of every hook and the time they take."""
    costs = trainer.hooks.cost()
    table = Table("hook", "event", title=f"Hooks took {sum(cost.seconds for cost in costs) / seconds:.2%} of {seconds:.0f} s")
    for heading in ("calls", "total ms", "µs/call"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(cost.hook, cost.event, str(cost.calls), f"{cost.seconds * 1e3:.1f}", f"{cost.mean * 1e6:.0f}")
    Console().print(table)


def main() -> None:
    """Train, and tell what came of it."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the texts behind Python's help().")
    parser.add_argument("--steps", type=int, default=800, help="optimizer updates (default: %(default)s)")
    parser.add_argument("--run-dir", help="where to write (default: a new directory in runs/)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))  # topics quote each other; validation must not ask for what was trained on
    alphabet = sorted(set(text))
    codes = torch.tensor([*map({each: code for code, each in enumerate(alphabet)}.__getitem__, text)])
    entropy = -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())
    cut = len(text) * 9 // 10
    train = TensorDataset(codes[:cut].unfold(0, CONTEXT + 1, 1))
    val = TensorDataset(codes[cut:].unfold(0, CONTEXT + 1, CONTEXT))
    sampler = RandomSampler(train, num_samples=arguments.steps * BATCH)  # the whole run is one epoch

    torch.manual_seed(arguments.seed)
    model = GPT(len(alphabet))
    trainer = Trainer(
        max_epochs=1, val_check_interval=0.2, gradient_clip_val=1.0, log_every_n_steps=10,
        seed=arguments.seed, run_dir=arguments.run_dir, hooks=[WatchGradients()],
    )  # fmt: skip

    @trainer.on("validation_end", when=lambda sanity_checking: not sanity_checking)
    def report(step: int, metrics: Metrics) -> None:
        print(f"step {step:4}   validation loss {metrics['val/loss']:.3f}")

    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text):,} characters of text, a GPT with {parameters:,} parameters, on {trainer.device}", flush=True)
    began = time.perf_counter()
    metrics = trainer.fit(model, DataLoader(train, BATCH, sampler=sampler), DataLoader(val, BATCH))
    seconds = time.perf_counter() - began

    prompt = torch.tensor([[alphabet.index(each) for each in "The "]], device=model.device)
    print("\n--- what it writes now ---", "".join(alphabet[code] for code in model.eval().write(prompt, 400)[0]), "---", sep="\n")
    print(f"\nValidation loss {metrics['val/loss']:.3f} nats per character; knowing only how often each occurs: {entropy:.3f}\n")
    show_costs(trainer, seconds)
    print(f"The log of this run: {trainer.run_dir / 'log.jsonl'}")


if __name__ == "__main__":
    main()
