"""How runs of several ranks begin, and what batches that count for nothing leave behind. Run with hook_cases.py under torchrun."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks.worlds import RANK, Deep, Own, fit, mine, pairs, quiet, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import DDP, FSDP, DataModule, Hook
from hookline.hooks import EarlyStopping, LRSchedule

DATA = pairs(6)
STRATEGIES: dict[str, Callable[..., Any]] = {"ddp": DDP, "fsdp": FSDP}


# ---- beginning -----------------------------------------------------------------------------------------------------


def timeouts() -> list[float]:
    """Of the groups that ranks talk over beside the model's; called before any other strategy was connected."""
    strategy = DDP(timeout=777)
    strategy.connect()
    groups: list[Any] = [strategy.ranks.group, strategy.ranks.beside().group]
    return [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups]


def explained() -> list[Any]:
    """On rank zero alone, before a run and between two of them."""
    torch.manual_seed(1)
    module, trainer = Deep(), quiet(DDP())
    texts = [str(trainer.explain(module, mine(DATA)))] if RANK == 0 else []
    trainer.fit(module, mine(DATA))
    texts += [str(trainer.explain(module, mine(DATA)))] if RANK == 0 else []
    return [
        trainer.state.step,
        float(trainer.validate(module, mine(DATA))["val/loss"]),
        ["train" in each for each in texts],
    ]


def other_verb() -> None:
    trainer = quiet(DDP())
    if RANK == 0:
        trainer.fit(Deep(), mine(DATA))
    else:
        trainer.validate(Deep(), mine(DATA))


def validates_on_zero() -> None:
    quiet(DDP()).fit(Deep(), mine(DATA), mine(DATA) if RANK == 0 else None)


class OtherOptimizers(Deep):
    """With optimizers that the ranks create differently."""

    def __init__(self, *of_ranks: Callable[[Any], Any]) -> None:
        super().__init__()
        self.of_ranks = of_ranks

    def configure_optimizers(self) -> Any:
        return self.of_ranks[RANK]([{"params": [each]} for each in list(self.parameters())[:2]])


def other_optimizers(*of_ranks: Callable[[Any], Any]) -> None:
    quiet(DDP()).fit(OtherOptimizers(*of_ranks), mine(DATA))


def other_datasets() -> None:
    """Which have as many batches on both ranks."""
    data = TensorDataset(*(torch.zeros(8 - RANK, size) for size in (4, 2)))
    quiet(DDP()).fit(Deep(), DataLoader(data, 2))


def other_batch_sizes() -> None:
    """Two batches on both ranks."""
    data = TensorDataset(*(torch.zeros(8, size) for size in (4, 2)))
    quiet(DDP()).fit(Deep(), DataLoader(data, 4 + RANK))


def other_arguments() -> None:
    hooks = [LRSchedule("cosine", warmup=2 + RANK), EarlyStopping("train/loss", patience=3)]
    quiet(DDP(), hooks=hooks).fit(Deep(), mine(DATA))


class Watches(Hook):
    def __init__(self, limit: float, rank: int, path: str) -> None:
        self.limit, self.rank, self.path = limit, rank, path


def own_arguments() -> list[str]:
    """What is logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hookline").addHandler(handler)
    quiet(DDP(), hooks=[Watches(0.5 + RANK, RANK, f"out/{RANK}")]).fit(Deep(), mine(DATA))
    logging.getLogger("hookline").removeHandler(handler)
    return [each for each in logged if "arguments" in each]


class Downloads(DataModule):
    """Into a folder of the machine, which takes a while."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.noted: list[Any] = []

    def prepare_data(self) -> None:
        self.noted.append("downloads")
        if self.fails:
            raise OSError("no space left")
        time.sleep(0.3)
        Path("downloaded").write_text("")

    def setup(self, stage: str) -> None:
        self.noted.append(Path("downloaded").exists())

    def train_dataloader(self) -> Any:
        return mine(DATA)


def downloaded() -> list[Any]:
    data = Downloads()
    quiet(DDP()).fit(Deep(), datamodule=data)
    return data.noted


# ---- a rank that has no batch any more -------------------------------------------------------------------------------


class Adds(nn.Module):
    """Adds up what it is shown, as the metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def update(self, count: int) -> None:
        self.total += count

    def compute(self) -> int:
        return self.total

    def reset(self) -> None:
        self.total = 0


class Counts(Deep):
    """Samples, by a metric object; batches, by batch norm; updates, by a buffer that a hook advances."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = Adds()
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("updates", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples.update(len(batch[0]))
        x = self.norm(batch[0]) if len(batch[0]) > 1 else batch[0]
        return self.measure((x, *batch[1:]))

    def on_after_optimizer_step(self) -> None:
        self.updates += 1


def counted(make: Callable[[], Any], data: Any) -> list[int]:
    module = Counts()
    quiet(make()).fit(module, data)
    return [module.samples.total, int(module.norm.num_batches_tracked or 0), int(module.updates)]


def dealt(batch_size: int, samples: int = 13) -> Any:
    """In batches of 3 for each of two ranks, the last turn has one sample, or with 15 of them two and one."""
    x, y, tags = (torch.cat(parts) for parts in zip(*(pair[0] for pair in DATA[:5]), strict=True))
    return DataLoader(
        TensorDataset(x[:samples], y[:samples], tags.repeat(2)[:samples]), batch_size=batch_size
    )


def own() -> Own:
    """Two batches for rank zero, five for the other."""
    return Own(mine(DATA)[: 2 if RANK == 0 else 5])


class Rows(Hook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_metrics(self, metrics: Any) -> None:
        self.seen += [float(metrics["train/loss"])] if "lr" in metrics else []


class Losses(Rows):
    def on_step_end(self, loss: float, ctx: Any) -> None:
        self.seen += [loss, float(ctx.loss)]


def losses(strategy: Any, batch_size: int) -> list[float]:
    """Of a window whose last batch is shorter than the others, in rows and at the end of the step."""
    found = []
    for hook, samples in ((Losses(), 13), (Rows(), 13), (Losses(), 15), (Rows(), 15)):
        fit(
            strategy, dealt(batch_size, samples), hooks=[hook], accumulate_grad_batches=3, log_every_n_steps=1
        )
        found += hook.seen
    return found


def main() -> None:
    report("explained on zero", explained)
    report("another verb", other_verb)
    report("other data", validates_on_zero)
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    report(
        "another lr",
        lambda: other_optimizers(lambda groups: sgd(groups, 0.1), lambda groups: sgd(groups, 0.2)),
    )
    report("other betas", lambda: other_optimizers(adam, lambda groups: adam(groups, betas=(0.8, 0.99))))
    report("another optimizer", lambda: other_optimizers(sgd, adam))
    report("other arguments", other_arguments)
    report("other arguments of an own hook", own_arguments)
    report("another group", lambda: other_optimizers(sgd, lambda groups: sgd(groups[:1])))
    report("other datasets", other_datasets)
    report("other batch sizes", other_batch_sizes)
    report("other lists", lambda: quiet(DDP()).fit(Deep(), list(mine(DATA))[RANK:] * 2))
    report("after other optimizers", lambda: quiet(DDP()).fit(Deep(), mine(DATA)) and None)
    report(
        "another start", lambda: quiet(DDP()).fit(Deep(), mine(DATA), resume="auto" if RANK == 0 else None)
    )
    report(
        "other weights",
        lambda: quiet(DDP()).validate(Deep(), mine(DATA), checkpoint=None if RANK == 0 else "best"),
    )
    report("downloads", downloaded)
    for name, make in STRATEGIES.items():
        report(f"{name}: shared data counted", lambda m=make: counted(m, dealt(3)))  # type: ignore[misc]
        report(f"{name}: own data counted", lambda m=make: counted(m, own()))  # type: ignore[misc]
        report(f"{name}: losses of a window", lambda m=make: [losses(m(), 3), losses("single", 6)])  # type: ignore[misc]
    report("download fails", lambda: quiet(DDP()).fit(Deep(), datamodule=Downloads(fails=True)))
    report("after it", lambda: fit(DDP(), mine(DATA))[1].state.step)
