"""What each rank of a job measures, logs and hears of metrics. Run by torchrun; each rank writes a line of JSON per run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ranks.dealt_script import Numbered, Small, numbered
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hookline import Hook, Logger, StopTraining, Trainer

RANK = int(os.environ.get("RANK", "0"))
torchmetrics: Any = None
with contextlib.suppress(ImportError):
    import torchmetrics


class Rows(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self.rows.append([step, dict(metrics)])


class Measures(Small):
    """Logs in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.layer(x), y)
        self.log("size", float(x[:, 0].mean()), on_epoch=True)
        self.log("sum", float(x[:, 0].sum()), on_step=False, on_epoch=True, reduce="sum")
        self.log("largest", float(x[:, 0].max()), on_step=False, on_epoch=True, reduce="max")
        self.log("smallest", x[:, 0].min(), on_step=False, on_epoch=True, reduce="min")
        self.log(f"of_rank_{RANK}", float(RANK), on_epoch=True)
        return {"loss": loss, "beside": x[:, 0].mean()}


class ZeroHears(Hook):
    """Only rank zero calls it; what it asks for takes all ranks."""

    ranks = "zero"

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ctx: list[Any] = []

    def on_step_end(self, trainer: Any, loss: float, ctx: Any, step: int) -> None:
        self.losses.append(loss)
        self.ctx.append([ctx.loss, ctx.tokens_seen])
        if step == 2:
            trainer.log("only_zero", 7.0)


class LastHears(Hook):
    """Only another rank calls it: a row is made for it although nobody writes rows."""

    ranks = (1,)

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_metrics(self, metrics: Any) -> None:
        self.rows.append(dict(metrics))


class Hears(Hook):
    """What everyone hears at the events that decisions are made at; logs a value of its own rank at every step."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_step_end(self, trainer: Any) -> None:
        trainer.log("rank", float(RANK))

    def on_validation_end(self, metrics: Any) -> None:
        self.heard.append(["validation", dict(metrics)])

    def on_train_epoch_end(self, metrics: Any) -> None:
        self.heard.append(["epoch", dict(metrics)])

    def on_train_end(self, metrics: Any) -> None:
        self.heard.append(["end", dict(metrics)])


class Counted(Small):
    """Has an object that adds up what it sees, as torchmetrics' do."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        self.metric.update(batch[0][:, 0])
        self.log("val/mean", self.metric)
        self.log("val/batches", 1.0, reduce="sum")
        return loss


class OwnMean(torch.nn.Module):
    """The mean of what it has seen on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = torch.zeros(()), 0

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return self.total / self.count

    def reset(self) -> None:
        self.total, self.count = torch.zeros(()), 0


class Stops(Small):
    """One rank wants to end a test."""

    tested = 0

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.tested += 1
        if RANK == 1:
            raise StopTraining("enough")
        return super().test_step(batch, batch_idx)


def trainer(*hooks: Any, **options: Any) -> Trainer:
    return Trainer(
        **{
            "logger": False,
            "enable_progress_bar": False,
            "max_epochs": 1,
            "seed": 1,
            "num_sanity_val_steps": 0,
            "hooks": hooks,
            **options,
        }
    )


def data(world: int, n: int = 22) -> Any:
    return DataLoader(Numbered(n), 2 * world // int(os.environ.get("WORLD_SIZE", "1")), shuffle=True)


def all_ways(world: int) -> dict[str, Any]:
    """Everything that is logged in a run; with one process the same on batches that are as large as those of all ranks."""
    rows, hears = Rows(), Hears()
    ran = trainer(hears, logger=rows, max_epochs=2, log_every_n_steps=2, val_check_interval=2)
    metrics = ran.fit(Measures(), data(world), DataLoader(Numbered(7), 2))
    return {"metrics": dict(metrics), "rows": rows.rows, "heard": hears.heard}


def listened(world: int) -> dict[str, Any]:
    """Hooks that only some ranks call."""
    rows, zero, last = Rows(), ZeroHears(), LastHears()
    ran = trainer(zero, last, logger=rows, log_every_n_steps=3)
    ran.fit(Measures(), data(world))
    return {
        "losses": zero.losses,
        "ctx": zero.ctx,
        "heard": last.rows,
        "rows": rows.rows,
        "newest": dict(ran.metrics),
    }


def evaluated(strategy: str, make: Callable[[], Any]) -> dict[str, Any]:
    """Fewer batches than ranks could take: some have one less."""
    model = Counted(make())
    ran = trainer(strategy=strategy)
    fitted = ran.fit(model, numbered(5, 2), numbered(3, 2))
    again = ran.validate(model, DataLoader(Numbered(9), 2))
    return {"metrics": dict(fitted), "validated": dict(again)}


def main(folder: Path) -> None:
    """Every run once."""
    world = int(os.environ["WORLD_SIZE"])
    told = (folder / f"told-{RANK}.jsonl").open("w")

    def tell(name: str, value: Any) -> None:
        print(json.dumps([name, value]), file=told, flush=True)

    tell("all ways", all_ways(world))
    tell("listened", listened(world))
    for strategy in ("ddp", "fsdp"):
        tell(strategy, evaluated(strategy, OwnMean))
        if torchmetrics is not None:
            tell(f"{strategy} with torchmetrics", evaluated(strategy, torchmetrics.MeanMetric))
    ran, model = trainer(), Stops()
    ran.test(model, numbered(40))
    tell("stopped", model.tested)
    predicted = trainer().predict(Small(), DataLoader(Numbered(5), 2))
    tell("predicted", [len(each) for each in predicted])
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
