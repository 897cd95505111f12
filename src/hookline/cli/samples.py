"""`hookline samples`: the samples behind updates of a run, computed from its record."""

from __future__ import annotations

import argparse
import itertools
import re
import zlib

from hookline.cli.output import format_table, print_result
from hookline.report.summary import find_run_dir
from hookline.run.record import read_record
from hookline.run.sample_order import Sample, SampleOrder, read_order
from hookline.run.state import count_noun
from hookline.util.errors import OptionError, UnknownSamples
from hookline.util.text import wrapped_list

MOST_STEPS = 10_000


def print_samples(chosen: argparse.Namespace) -> int:
    """Print every sample behind one update, or behind several."""
    run_dir = find_run_dir(chosen.run_dir)
    record = read_record(run_dir)
    if not record:
        raise OptionError(f"{run_dir} is not the directory of a run: it has no readable run.json.")
    if not record.get("order"):
        raise UnknownSamples(
            f"{run_dir}: run.json does not have the order of the training data: the run was made with an "
            "older version, or ended before its first batch."
        )
    order, steps = read_order(record["order"]), _parse_steps(chosen.step, record["step"])
    try:
        found = {step: order.samples(step) for step in steps}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, zlib.error) as error:
        raise UnknownSamples(
            f"{run_dir}: the order of the training data in run.json is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    if chosen.plain:
        print("\n".join(_as_lines(found)))
        return 0
    data = {
        "run_dir": str(run_dir),
        "steps": [
            {"step": step, "samples": [each._asdict() for each in samples]} for step, samples in found.items()
        ],
        "exclusions": record.get("exclusions", []),
    }
    text = "\n\n".join(_describe(order, step, samples) for step, samples in found.items())
    return print_result(chosen, data, text)


def _parse_steps(text: str, last: int) -> range:
    """Return the steps of `N` or `N-M`."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, end = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= end <= last:
        raise OptionError(
            f"--step {text}: pass a step of the run, from 1 to {last}, or several as in 100-120.",
            option="step",
            value=text,
        )
    if end - first >= MOST_STEPS:
        raise OptionError(
            f"--step {text}: these are more than {MOST_STEPS} steps.", option="step", value=text
        )
    return range(first, end + 1)


def _as_lines(found: dict[int, list[Sample]]) -> list[str]:
    """Return one line for each sample, for ExcludeSamples: its loader if there are several, and its index."""
    named = sorted({(each.loader, each.id) for samples in found.values() for each in samples})
    several = len({name for name, _ in named}) > 1
    return [f"{name} {sample}" if several else str(sample) for name, sample in named]


def _describe(order: SampleOrder, step: int, samples: list[Sample]) -> str:
    epoch, batches = order.windows.batches(step) or (0, [])
    numbers = f"{batches[0]} to {batches[-1]}" if len(batches) > 1 else "".join(map(str, batches))
    what = "batches" if len(batches) > 1 else "batch"
    head = f"step {step}: {count_noun(len(samples), 'sample', 'samples')}, epoch {epoch}, {what} {numbers}"
    rows: list[list[str]] = [["loader", "rank", "batch", "samples"]]
    for (loader, rank, batch), group in itertools.groupby(samples, lambda each: (each[0], each[1], each[3])):
        for number, line in enumerate(wrapped_list([str(each.id) for each in group], 40)):
            rows.append([loader, str(rank), str(batch), line] if number == 0 else ["", "", "", line])
    return f"{head}\n{format_table(rows)}"
