"""Runs to make reports of, and what a page carries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.hooks import GradientMonitor, LRMonitor, ModelCheckpoint, Throughput
from hookline.report.page import render_page
from hookline.report.reader import read_run
from hookline.testing import TinyModule, tiny_batches

MARKUP = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


class Samples(Hook):
    """Logs what a person would look at, under names that would be markup."""

    def on_train_epoch_end(self, logger: Any, step: int) -> None:
        logger.add_text(f"sample {MARKUP}", f"once upon a time {MARKUP}", step)
        logger.add_image("weights", torch.rand(3, 8, 8), step)


class Named(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log(MARKUP, loss.detach())
        return loss


def whole_run(path: str = "run", epochs: int = 3, lr: float = 0.1) -> Path:
    """A real run with everything in its log."""
    hooks = [
        GradientMonitor(log_frequency=1),
        LRMonitor(frequency="step"),
        Throughput(every=2),
        Samples(),
        ModelCheckpoint(monitor="val/loss", save_top_k=2),
    ]
    trainer = quiet(
        run_dir=path, logger=True, max_epochs=epochs, log_every_n_steps=1, hooks=hooks, checkpoint=True
    )
    trainer.fit(Named(lr), batches(), batches(2))
    return Path(path)


def written(path: str | Path, *records: dict[str, Any], after: str = "") -> Path:
    """A directory with a log of these records."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(
        json.dumps({"time": 1.7e9 + number, **record}) + "\n" for number, record in enumerate(records)
    )
    (folder / "log.jsonl").write_text(text + after)
    return folder


def metrics(step: int, **values: Any) -> dict[str, Any]:
    return {
        "type": "metrics",
        "step": step,
        "epoch": 0,
        "metrics": {name.replace("__", "/"): value for name, value in values.items()},
    }


def traced(
    path: Path, *calls: tuple[str, str, float, float, int], rank: int = 0, clock: int = 0, closed: bool = True
) -> Path:
    """A trace as a run writes it: calls of hooks as (hook, event, microseconds from the start, microseconds, step)."""
    about = {"format": 1, "rank": rank, "clock_ns": clock, "unix_ns": 1_700_000_000_000_000_000}
    lines = [{"name": "hookline", "ph": "M", "pid": rank, "tid": 0, "args": about}]
    for hook, event, start, took, step in calls:
        lines.append(
            {
                "name": hook,
                "cat": "hook",
                "ph": "X",
                "pid": rank,
                "tid": 0,
                "args": {"event": event, "step": step},
                "ts": clock / 1e3 + start,
                "dur": took,
            }
        )
    file = path / ("trace.json" if rank == 0 else f"trace.rank{rank}.json")
    file.write_text("[" + ",\n".join(json.dumps(each) for each in lines) + ("\n]\n" if closed else ",\n"))
    return file


def page_of(*paths: Path) -> str:
    return render_page([read_run(path) for path in paths])


def data_in(page: str) -> dict[str, Any]:
    """What the page's script will read, as a browser cuts it out: up to the first end of the element."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def data_of(*paths: Path) -> dict[str, Any]:
    return data_in(page_of(*paths))


def curve(data: dict[str, Any], name: str, run: int = 0) -> dict[str, Any]:
    found = [
        each
        for section in data["sections"]
        for chart in section["charts"]
        for each in chart["series"]
        if each["name"] == name and each["run"] == run
    ]
    assert len(found) == 1
    return found[0]


def trained(name: str, lr: float = 0.1, epochs: int = 2, hooks: Any = (), **options: Any) -> Path:
    trainer = quiet(
        logger=True,
        run_dir=f"runs/{name}",
        max_epochs=epochs,
        hooks=list(hooks),
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(TinyModule(lr), tiny_batches(), tiny_batches(seed=1))
    return trainer.run_dir


def recorded(name: str, log: list[dict[str, Any]] | None = None, **record: Any) -> Path:
    path = Path(name)
    path.mkdir(parents=True)
    if record:
        whole = {"id": name, "status": "completed", "reason": "", "step": 1, "limits": {}, **record}
        (path / "run.json").write_text(json.dumps(whole))
    if log is not None:
        (path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))
    return path


def evaluation_row(step: int, **metrics: float) -> dict[str, Any]:
    return {
        "type": "metrics",
        "time": 1.0 + step,
        "step": step,
        "epoch": 0,
        "over": "evaluation",
        "metrics": metrics,
    }
