"""Train on a stream of text that resumes exactly: the dataset tells how far it has been read.

The text is the source of Python's standard library. Stop the run at any time, also with `kill -9`, and start
it again: it continues from its newest checkpoint. `kill_and_resume.py` beside this file shows it.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from hookline import Hook, Module, Trainer, every, seed_everything
from hookline.hooks import ModelCheckpoint


class SourceCode(IterableDataset[Tensor]):
    """Windows of bytes, file after file. `state_dict` says where the next window begins."""

    def __init__(self, files: Sequence[Path], size: int = 65) -> None:
        self.files, self.size = files, size
        self.file = self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.file < len(self.files):
            text = self.files[self.file].read_bytes()
            while self.position + self.size <= len(text):
                window = text[self.position : self.position + self.size]
                self.position += self.size
                yield torch.tensor(list(window))
            self.file, self.position = self.file + 1, 0
        self.file = 0  # the next epoch

    def state_dict(self) -> dict[str, int]:
        """Return the place of the next window; a checkpoint stores it."""
        return {"file": self.file, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at that place."""
        self.file, self.position = state["file"], state["position"]


class ByteModel(Module):
    """Predicts the next byte. Its dropout shows that random numbers resume exactly, too."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(256, width), nn.Dropout(0.1)
        self.gru, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 256)

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        hidden, _ = self.gru(self.dropout(self.embedding(windows[:, :-1])))
        return cross_entropy(self.head(hidden).flatten(0, 1), windows[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class Report(Hook):
    """Prints where the run begins, and the loss from time to time."""

    def on_train_start(self, step: int, resumed: bool) -> None:
        print(f"{'resumed' if resumed else 'begins'} at step {step}", flush=True)

    @every("50 steps")
    def on_step_end(self, step: int, loss: float) -> None:
        print(f"step {step}: loss {loss:.4f}", flush=True)


class Kill(Hook):
    """Kills the process after a step, as a machine that fails does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_step_end(self, step: int) -> None:
        if step == self.at:
            print(f"killed at step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/streaming")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--kill-at", type=int, default=0)
    options = parser.parse_args()

    seed_everything(0)
    library = Path(os.__file__).parent
    stream = SourceCode([library / name for name in ("argparse.py", "ast.py", "inspect.py", "typing.py")])
    hooks = [Report(), ModelCheckpoint(every_n_train_steps=options.save_every)]
    trainer = Trainer(
        max_steps=options.steps,
        run_dir=options.run_dir,
        hooks=[*hooks, Kill(options.kill_at)] if options.kill_at else hooks,
        enable_progress_bar=False,
    )
    trainer.fit(ByteModel(), DataLoader(stream, batch_size=16), resume="auto")


if __name__ == "__main__":
    main()
