"""Streaming datasets of other packages: a run that is killed in the middle of an epoch and resumed trains on the samples of
a run that was not interrupted, or says at the start and at the resume what is lost.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
import pytest
from interop.processes import IMPORTED, environment
from ranks.torchrun import torchrun
from thorough import some

PROGRAM = "from interop.libraries import main; main()"
SAVED, KILLED = 8, 10
"""Batches. An epoch has 6: both are in the middle of the second one."""


def started(request: dict[str, Any], **more: str) -> subprocess.Popen[str]:
    return preloaded.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(request)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=request["folder"],
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples in the format of every library."""
    folder = tmp_path_factory.mktemp("data")
    code = "import sys, pathlib; from interop.libraries import write; write(pathlib.Path(sys.argv[-1]))"
    preloaded.run([sys.executable, "-c", code, str(folder)], env=environment(), check=True, timeout=300)
    return folder


@dataclass(frozen=True)
class Row:
    """What is promised for one loader. result: "exact": the same samples and weights; "order": the same samples, with other
    random numbers; "lost": other samples.
    """

    kind: str
    workers: int = 0
    shuffle: bool = True
    result: str = "exact"
    said: str = ""
    """At the start and at the resume."""
    loader: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    save: int = SAVED
    validates: bool = False
    """After each epoch, on all samples."""

    def __str__(self) -> str:
        more = [*self.loader, *self.options, *(["end of epoch"] if self.save != SAVED else [])]
        more += ["validates"] if self.validates else []
        order = "shuffled" if self.shuffle else "in order"
        return " ".join([self.kind, f"workers={self.workers}", order, *more])


WORKERS_OF_TORCHDATA = "not the random numbers that a dataset draws in its workers. Use torch's DataLoader"
READ_AGAIN = "it is resumed by reading the epoch again, and only with the same number of workers"
UNSEEDED_HF = "shuffles a Hugging Face stream without a seed. Each process draws a different order"
UNSEEDED_WDS = "shuffles with webdataset's .shuffle(8) without a seed. Each process draws a different order"
OWN_STATE = (
    "has a state that is not used, because StreamingDataset.state_dict or load_state_dict needs further"
)
PERSISTENT = "has persistent_workers: their random streams continue from epoch to epoch"
LIMITED = {"limit_train_batches": 5}
END_OF_EPOCH = 12

TABLE = [
    # torchdata
    Row("torchdata", validates=True),
    Row("torchdata", save=END_OF_EPOCH),
    Row("torchdata", loader={"generator": True}),
    Row("torchdata", loader={"stream": True}, shuffle=False),
    Row("torchdata", 2, said=WORKERS_OF_TORCHDATA, loader={"persistent_workers": True}, options=LIMITED),
    Row("torchdata", 2, result="order", said=WORKERS_OF_TORCHDATA, loader={"noise": True}),
    # Hugging Face
    Row("hf_rows", 2, options={"prefetch_batches": 2}),
    Row("hf_stream", loader={"buffer": 1}, options=LIMITED),
    Row("hf_stream", validates=True),
    Row("hf_stream", loader={"parquet": True}),
    Row("hf_stream", loader={"batched": True}),
    Row("hf_stream", result="lost", said=UNSEEDED_HF, loader={"seed": None}),
    Row("hf_stream", 2, said=READ_AGAIN, options={"prefetch_batches": 2}),
    Row("hf_stream", 2, said=WORKERS_OF_TORCHDATA, loader={"stateful": True}, shuffle=False),
    Row("hf_stream", loader={"stateful": True}),
    Row("hf_stream", 2, said=READ_AGAIN, loader={"stateful": True}),
    # MosaicML
    Row("mosaicml", save=END_OF_EPOCH),
    Row("mosaicml", options=LIMITED),
    Row("mosaicml", 2, validates=True),
    Row("mosaicml", 2, loader={"plain": True}, options={"prefetch_batches": 2}),
    # LitData
    Row("litdata", validates=True),
    Row("litdata", save=END_OF_EPOCH),
    Row("litdata", options=LIMITED),
    Row("litdata", 2),
    Row("litdata", loader={"combined": True}, options={"limit_train_batches": 6}),
    Row("litdata", loader={"plain": True}, said=OWN_STATE),
    # webdataset
    Row("wds"),
    Row("wds", loader={"batched": True}, options=LIMITED),
    Row("wds", 2, said=READ_AGAIN, options={"prefetch_batches": 2}, validates=True),
    Row("wds", 2, said=READ_AGAIN, loader={"web": True}),
    Row("wds", 2, result="lost", said=PERSISTENT, loader={"persistent_workers": True}),
    Row("wds", result="lost", said=UNSEEDED_WDS, loader={"seeded": False}),
]

MORE = [
    Row("torchdata"),
    Row("torchdata", shuffle=False),
    Row("torchdata", options=LIMITED),
    Row("torchdata", loader={"generator": True}, save=END_OF_EPOCH),
    Row("torchdata", 2, said=WORKERS_OF_TORCHDATA),
    Row("torchdata", 2, said=WORKERS_OF_TORCHDATA, loader={"generator": True}),
    Row("torchdata", 2, said=WORKERS_OF_TORCHDATA, loader={"stream": True}, shuffle=False),
    Row("hf_rows"),
    Row("hf_rows", 2, loader={"persistent_workers": True}),
    Row("hf_stream"),
    Row("hf_stream", shuffle=False),
    Row("hf_stream", shuffle=False, save=END_OF_EPOCH),
    Row("hf_stream", shuffle=False, loader={"parquet": True}),
    Row("hf_stream", shuffle=False, loader={"batched": True}),
    Row("hf_stream", 2, shuffle=False, said=READ_AGAIN),
    Row("hf_stream", 2, said=PERSISTENT, loader={"persistent_workers": True}),
    Row("hf_stream", loader={"stateful": True}, shuffle=False),
    Row("mosaicml"),
    Row("mosaicml", validates=True),
    Row("mosaicml", shuffle=False),
    Row("mosaicml", 2),
    Row("mosaicml", 2, loader={"persistent_workers": True}),
    Row("litdata"),
    Row("litdata", shuffle=False),
    Row("litdata", 2, loader={"persistent_workers": True}),
    Row("litdata", 2, loader={"plain": True}, said=OWN_STATE),
    Row("wds", shuffle=False),
    Row("wds", 2, said=READ_AGAIN, validates=True),
    Row("wds", 2, said=READ_AGAIN, options={"prefetch_batches": 2}),
    Row("wds", 2, shuffle=False, said=PERSISTENT, loader={"persistent_workers": True}),
    Row("wds", 2, result="lost", said=UNSEEDED_WDS, loader={"seeded": False}),
]
"""Those that a change rarely tells apart from others."""


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def samples(folder: Path, name: str) -> list[list[int]]:
    return [json.loads(line) for line in (folder / f"{name}.samples").read_text().splitlines()]


def killed_and_resumed(row: Row, data: Path, folder: Path) -> None:
    """Train a run, and the same run again, which is killed and resumed, each in its own processes."""
    given = {"num_workers": row.workers} if row.workers else {}

    def request(name: str, directory: str, **own: Any) -> dict[str, Any]:
        loader = {"kind": row.kind, "shuffle": row.shuffle, **given, **row.loader}
        return {
            "data": str(data), "folder": str(folder), "loader": loader, "name": name, "directory": directory,
            "validates": row.validates, **row.options, **own,
        }  # fmt: skip

    whole = started(request("whole", "whole"))
    if row.kind == "mosaicml":
        ended(whole)  # two processes that start at once may choose the same name in shared memory
    kill = row.save + KILLED - SAVED
    ended(started(request("killed", "run", save=row.save, kill=kill)), -signal.SIGKILL)
    ended(started(request("rest", "run", resume="auto")))
    if row.kind != "mosaicml":
        ended(whole)


@pytest.mark.parametrize("row", some(TABLE, MORE), ids=str)
def test_a_killed_run_resumes_as_promised(row: Row, data: Path, tmp_path: Path) -> None:
    killed_and_resumed(row, data, tmp_path)
    whole, killed, rest = (samples(tmp_path, name) for name in ("whole", "killed", "rest"))
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("whole", "killed", "rest")}
    assert len(killed) == row.save + KILLED - SAVED
    same_order = rest == whole[row.save :]
    same_weights = read(tmp_path, "rest.weights") == read(tmp_path, "whole.weights")
    expected = {"exact": (True, True), "order": (True, False), "lost": (False, False)}[row.result]
    assert (same_order, same_weights) == expected, (whole[row.save :], rest, logs["rest"])
    if row.result != "lost":
        assert killed == whole[: len(killed)]
        for first in range(0, len(whole), len(whole) // 3):
            epoch = sum(whole[first : first + len(whole) // 3], [])
            assert len(set(epoch)) == len(epoch) or "combined" in row.loader
    if "prefetch_batches" in row.options and row.kind != "hf_rows":
        assert "has no effect on the loader 'train': its workers fetch in advance already" in logs["killed"]
    if row.said:
        assert row.said in logs["killed"] and row.said in logs["rest"]
    else:
        assert "The train loader" not in logs["killed"] + logs["rest"]
    for name, count in (("whole", 3), ("rest", 2)) if row.validates else ():
        seen = read(tmp_path, f"{name}.validated")
        passes = [sum(seen[first : first + 6], []) for first in range(0, len(seen), 6)]
        assert len(passes) == count and all(sorted(each) == list(range(24)) for each in passes)


# ---- two ranks ---------------------------------------------------------------------------------------------------


RANKS = """
import sys, pathlib
from interop.libraries import rank_cases
rank_cases(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def job(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A job of two ranks: its folder, and what each rank said about the loaders that are refused."""
    folder = tmp_path_factory.mktemp("job")
    outcome = torchrun(RANKS, folder, str(data), str(folder), **IMPORTED)
    assert outcome.code == 0, outcome.output[-5000:]
    said: dict[str, list[str]] = {}
    for name, _, text in map(json.loads, outcome.lines("CASE ")):
        said.setdefault(name, []).append(text)
    return folder, said


@pytest.mark.parametrize(
    "name",
    [
        "torchdata",
        "torchdata workers",
        "hf_rows",
        "hf_stream",
        "hf_stream not split",
        "hf_stream in order",
        "mosaicml",
        "mosaicml workers",
        "litdata",
        "wds",
    ],
)
def test_two_ranks_train_on_every_sample_once_and_resume_exactly(
    name: str, job: tuple[Path, dict[str, list[str]]]
) -> None:
    folder = job[0] / name
    whole = [samples(folder, f"whole-{rank}") for rank in range(2)]
    for first in (0, 3, 6):
        epoch = [sample for rank in whole for batch in rank[first : first + 3] for sample in batch]
        assert sorted(epoch) == list(range(24))
    assert [samples(folder, f"rest-{rank}") for rank in range(2)] == [each[4:] for each in whole]
    weights = {
        (folder / f"{run}-{rank}.weights").read_text() for run in ("whole", "rest") for rank in range(2)
    }
    assert len(weights) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("litdata made early", "LitData's StreamingDataset reads the part of rank 0 of 2 on rank 1 of 2"),
        (
            "torchdata with a seed of each rank",
            "its random generators (sampler.generator) have different states",
        ),
        ("wds with the default nodesplitter", "Pass WebDataset(..., nodesplitter=wds.split_by_node)"),
        (
            "hf_stream split for another rank",
            "a Hugging Face stream reads the part of rank 0 of 2 on rank 1 of 2",
        ),
    ],
)
def test_ranks_that_would_share_their_samples_are_refused_on_every_rank(
    name: str, text: str, job: tuple[Path, dict[str, list[str]]]
) -> None:
    found = job[1][name]
    assert len(found) == 2 and all(text in each for each in found)


def test_rows_that_were_split_by_rank_before_are_reported(job: tuple[Path, dict[str, list[str]]]) -> None:
    assert (
        "is shared by all ranks, but its dataset differs." in (job[0] / "split" / "whole-0.log").read_text()
    )


# ---- the document ------------------------------------------------------------------------------------------------


def test_the_recipes_of_the_document_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data-libraries.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.S | re.M)
    assert len(blocks) == 6
    script = tmp_path / "recipes.py"
    script.write_text("\n".join(blocks))
    preloaded.run([sys.executable, str(script)], env=environment(), cwd=tmp_path, check=True, timeout=300)
    runs = sorted(each.name for each in (tmp_path / "runs").iterdir())
    assert runs == ["lit", "mds", "rows", "stream", "torchdata", "wds"]
    assert all((tmp_path / "runs" / name / "checkpoints" / "last").exists() for name in runs)
