"""`hookline samples`: the samples behind updates of a run, computed from its record."""

from __future__ import annotations

import argparse
import itertools
import re
import zlib
from typing import Any

from hookline.checkpoint.catalog import find_checkpoints
from hookline.cli.output import print_result
from hookline.report.reader import LOG
from hookline.report.summary import find_run_dir
from hookline.run.record import RECORD, read_record
from hookline.run.sample_order import Sample, SampleOrder, read_order
from hookline.run.state import count_noun
from hookline.util.errors import OptionError, UnknownSamples
from hookline.util.text import format_table, wrapped_list

MOST_STEPS = 10_000


def print_samples(chosen: argparse.Namespace) -> int:
    """Print every sample behind one update, or behind several."""
    run_dir = find_run_dir(chosen.run_dir)
    record = read_record(run_dir)
    if not (run_dir / RECORD).exists() and ((run_dir / LOG).exists() or find_checkpoints(run_dir)[0]):
        raise UnknownSamples(
            f"{run_dir} has no run.json, which hookline.Trainer writes. A loop with hookline.Line reads its "
            "data itself, so the order of its samples is not recorded. Only hookline.Trainer records it."
        )
    if not record:
        raise OptionError(f"{run_dir} is not the directory of a run: it has no readable run.json.")
    if not record.get("order"):
        raise UnknownSamples(
            f"{run_dir}: run.json does not have the order of the training data: the run was made with an "
            "older version, or ended before its first batch."
        )
    order = read_order(record["order"])
    try:
        found, texts, data = _find(chosen, record, order)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, zlib.error) as error:
        if isinstance(error, OptionError):
            raise
        raise UnknownSamples(
            f"{run_dir}: the order of the training data in run.json is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    if chosen.plain:
        print("\n".join(_as_lines(found)))
        return 0
    data = {"run_dir": str(run_dir), **data, "exclusions": record.get("exclusions", [])}
    return print_result(chosen, data, "\n\n".join(texts))


def _find(
    chosen: argparse.Namespace, record: dict[str, Any], order: SampleOrder
) -> tuple[list[list[Sample]], list[str], dict[str, Any]]:
    """Return the samples of each chosen update or of the chosen batches, as they are, as text and as data."""
    if (chosen.step is None) == (chosen.batch is None) or (chosen.epoch is None) != (chosen.batch is None):
        raise OptionError("hookline samples: pass --step N, or --epoch E and --batch B.")
    if chosen.batch is not None:
        epoch, batches = _parse(chosen.epoch, "epoch")[0], [*_parse(chosen.batch, "batch")]
        samples = order.of_batches(epoch, batches)
        data = {"epoch": epoch, "batches": batches, "samples": [each._asdict() for each in samples]}
        return [samples], [_describe("", epoch, batches, samples)], data
    last, windows = record["step"], order.windows
    opened = None if order.reached is None else windows.open_window(last, *order.reached)
    found, texts, rows = [], [], []
    for step in _parse_steps(chosen.step, record, is_open=opened is not None):
        is_made = step <= last
        if opened is not None and not is_made:
            epoch, batches = opened.epoch, windows.trained(opened)
            samples = order.of_batches(epoch, batches)
        else:
            samples = order.samples(step)
            epoch, batches = windows.batches(step) or (0, [])
        head = f"step {step}" if is_made else f"step {step}, an update that was begun and not made"
        found.append(samples)
        texts.append(_describe(f"{head}: ", epoch, batches, samples))
        rows.append({"step": step, "made": is_made, "samples": [each._asdict() for each in samples]})
    return found, texts, {"steps": rows}


def _parse(text: str, option: str) -> range:
    """Return the numbers of `N` or `N-M`; of an epoch, only `N`."""
    numbers = _read_range(text, option)
    if not numbers or (option == "epoch" and len(numbers) > 1):
        several = "" if option == "epoch" else ", or several as in 100-120"
        raise OptionError(f"--{option} {text}: pass a number from 0 on{several}.", option=option, value=text)
    return numbers


def _read_range(text: str, option: str) -> range:
    """Return the numbers of `N` or `N-M`, none for any other text. Raise if they are too many."""
    match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", text.strip())
    numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if len(numbers) > MOST_STEPS:
        raise OptionError(f"--{option} {text}: these are more than {MOST_STEPS}.", option=option, value=text)
    return numbers


def _parse_steps(text: str, record: dict[str, Any], is_open: bool) -> range:
    """Return the steps of `N` or `N-M`. is_open: an update that was begun and not made counts as well."""
    last, steps = record["step"], _read_range(text, "step")
    if not steps or steps[0] < 1 or steps[-1] > last + is_open:
        limit = f"{last + 1} (an update that was begun and not made)" if is_open else str(last)
        behind = ""
        if record.get("status") == "training":
            behind = (
                f" run.json was written at {record.get('noted_at')}; a run that is running or was killed "
                "may have made more."
            )
        raise OptionError(
            f"--step {text}: pass a step of the run, from 1 to {limit}, or several as in 100-120.{behind} "
            "The batches of an update that was skipped: --epoch E --batch B, as in the log.",
            option="step",
            value=text,
        )
    return steps


def _as_lines(found: list[list[Sample]]) -> list[str]:
    """Return one line for each sample, for ExcludeSamples: its loader if there are several, and its index."""
    named = sorted({(each.loader, each.id) for samples in found for each in samples})
    several = len({name for name, _ in named}) > 1
    return [f"{name} {sample}" if several else str(sample) for name, sample in named]


def _describe(head: str, epoch: int, batches: list[int], samples: list[Sample]) -> str:
    numbers = f"{batches[0]} to {batches[-1]}" if len(batches) > 1 else "".join(map(str, batches))
    what = "batches" if len(batches) > 1 else "batch"
    head += f"{count_noun(len(samples), 'sample', 'samples')}, epoch {epoch}, {what} {numbers}"
    rows: list[list[str]] = [["loader", "rank", "batch", "samples"]]
    for (loader, rank, batch), group in itertools.groupby(samples, lambda each: (each[0], each[1], each[3])):
        for number, line in enumerate(wrapped_list([str(each.id) for each in group], 40)):
            rows.append([loader, str(rank), str(batch), line] if number == 0 else ["", "", "", line])
    return f"{head}\n{format_table(rows)}"
