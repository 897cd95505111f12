"""Train a small GPT, character by character, on the texts of Python's `help()`, and see what its hooks do.

About a minute on two CPU cores: `python3 dev.py demo`, or `hookline fit examples/gpt/gpt.toml
--datamodule.steps 100` for a first look. The configuration beside this file says which of these classes a run
uses.
"""

from __future__ import annotations

import math
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hookline import DataModule, Hook, Metrics, Module, Trainer, every

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 128, 4, 4
# topics quote each other: drop repeated paragraphs, so that validation text is not in the training text
TEXT = "\n\n".join(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
ALPHABET = sorted(set(TEXT))


class Block(nn.Module):
    """Attention over the characters so far, then an MLP for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        split = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each: batch, head, position, channel
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(attended.transpose(1, 2).flatten(-2))
        transformed: Tensor = self.mlp(self.norm2(x))
        return x + transformed


class GPT(Module):
    """Predicts the next character. A `hookline.Module` is a model together with its training."""

    def __init__(self, characters: int = len(ALPHABET)) -> None:
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

        def factor(step: int) -> float:  # linear warmup, then cosine decay to a tenth
            decay = max(0.0, step - warmup) / max(1.0, steps - warmup)
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * decay))

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.8) -> str:
        """Continue a text. The hook `generate_samples` calls it at every validation."""
        text = torch.tensor([[ALPHABET.index(each) for each in prompt]], device=self.device)
        for _ in range(length):
            logits = self(text[:, -CONTEXT:])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return "".join(ALPHABET[code] for code in text[0])


class Text(DataModule):
    """Windows of the text, drawn at random for training; the last tenth is for validation. The whole run is
    one epoch.
    """

    def __init__(self, steps: int = 800) -> None:
        self.steps = steps

    def setup(self, stage: str) -> None:
        codes = torch.tensor([*map({each: code for code, each in enumerate(ALPHABET)}.__getitem__, TEXT)])
        cut = len(codes) * 9 // 10
        self.train = TensorDataset(codes[:cut].unfold(0, CONTEXT + 1, 1))
        self.val = TensorDataset(codes[cut:].unfold(0, CONTEXT + 1, CONTEXT))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self.train, BATCH, sampler=RandomSampler(self.train, num_samples=self.steps * BATCH)
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, BATCH)


class WatchGradients(Hook):
    """Logs the gradient norm and prints the layer with the largest one. Methods name events, parameters name
    facts.
    """

    leader = ""

    @every("50 steps")
    def on_step_end(self, trainer: Trainer, module: GPT, step: int, grad_norm: float) -> None:
        trainer.log("grad_norm", grad_norm)
        norms = {name: float(p.grad.norm()) for name, p in module.named_parameters() if p.grad is not None}
        leader = max(norms, key=lambda name: norms[name])
        if leader != self.leader:
            print(f"step {step:4}   largest gradient: {leader}")
            self.leader = leader


class Report(Hook):
    """Prints the start of the run, its validations, and its result: a sample and the loss."""

    def on_fit_start(self, trainer: Trainer, module: GPT) -> None:
        parameters = sum(p.numel() for p in module.parameters())
        print(
            f"{len(TEXT):,} characters of text, a GPT with {parameters:,} parameters, on {trainer.device}",
            flush=True,
        )

    def on_validation_end(self, step: int, metrics: Metrics, sanity_checking: bool) -> None:
        if not sanity_checking:
            print(f"step {step:4}   validation loss {metrics['val/loss']:.3f}")

    def on_train_end(self, trainer: Trainer, module: GPT, metrics: Metrics) -> None:
        sample = module.eval().generate("The ", 400)
        entropy = -sum(n / len(TEXT) * math.log(n / len(TEXT)) for n in Counter(TEXT).values())
        print("\n--- what it writes now ---", sample, "---", sep="\n")
        if "val/loss" in metrics:  # a run that is cut short may end before its first validation
            loss = metrics["val/loss"]
            print(
                f"\nValidation loss {loss:.3f} nats per character; knowing only how often each occurs: "
                f"{entropy:.3f}\n"
            )
        print(f"The log of this run: {trainer.run_dir / 'log.jsonl'}", flush=True)
