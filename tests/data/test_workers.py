"""What the user sees of the workers of a loader, and what signals do to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from data.resumed import Samples
from torch.utils.data import DataLoader, get_worker_info

from hookline.data.loaders import make_loaders

TESTS = Path(__file__).parent.parent


class Told(Samples):
    """Says what the code in a worker can find out about it."""

    factor = 1.0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None and info.dataset is self and isinstance(info.dataset, Told)
        return torch.tensor([index * self.factor])


def double(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.factor = 2.0  # type: ignore[attr-defined]


def values(source: Any) -> list[float]:
    (only,) = make_loaders(source, 1.0, "train")
    found = [value for batch in only.open(0, 1, 5) for value in batch.flatten().tolist()]
    only.close()
    return found


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_users_init_function_changes_the_users_dataset(context: str) -> None:
    source: Any = DataLoader(
        Told(6), 2, num_workers=1, worker_init_fn=double, multiprocessing_context=context
    )
    assert values(source) == [4.0, 6.0, 8.0, 10.0]
    assert source.worker_init_fn is double


def test_without_automatic_batches() -> None:
    assert values(DataLoader(Told(4), None, num_workers=1)) == [1.0, 2.0, 3.0]


def test_a_loader_that_looks_at_its_dataset_finds_the_users() -> None:
    class Looking(DataLoader[Any]):
        def __iter__(self) -> Any:
            assert isinstance(self.dataset, Told) and self.dataset.factor == 1.0 and len(self.dataset) == 6
            self.dataset.factor = 3.0
            assert self.batch_sampler.batch_size == 2  # type: ignore[union-attr]
            return super().__iter__()

    source = Looking(Told(6), 2, num_workers=1)
    assert values(source) == [6.0, 9.0, 12.0, 15.0]


def test_workers_end_with_the_loader() -> None:
    source = DataLoader(Samples(), 3, num_workers=2, persistent_workers=True)
    (only,) = make_loaders(source, 1.0, "train")
    batches: Any = only.open(0, 0, 5)
    next(batches)
    workers = batches._workers
    only.close()
    assert not any(each.is_alive() for each in workers)
    assert [each.exitcode for each in workers] == [0, 0], (
        "they were told to end; one that is waited for in vain is killed"
    )
    assert len(list(only.open(1))) == 4, "and new ones begin when they are needed"
    only.close()


# Python's ways to start a worker: the one before 3.14, and the one since
START_METHODS = pytest.mark.parametrize("method", ["fork", "forkserver"])


@START_METHODS
def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_main_process(
    tmp_path: Path, method: str
) -> None:
    """The main process notes the signal and continues; its workers serve it to the end, and then end with it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, os, signal, sys, time
        sys.path.insert(0, {str(TESTS)!r})
        from data.resumed import Samples
        from torch.utils.data import DataLoader
        from hookline.data.loaders import make_loaders

        def main():
            # torch is imported once, not by each worker
            multiprocessing.set_forkserver_preload(["__main__", "hookline.data.loaders"])
            noted = []
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, lambda number, frame: noted.append(number))
            source = DataLoader(
                Samples(60), 1, num_workers=2, persistent_workers=True, multiprocessing_context={method!r}
            )
            (only,) = make_loaders(source, 1.0, "train")
            os.register_at_fork(after_in_child=lambda: time.sleep(0.4))
            print("opening", flush=True)
            batches = only.open(0, 0, 5)
            next(batches)
            print("opened", flush=True)
            while len(noted) < 6:
                time.sleep(0.01)
            print(1 + len(list(batches)), len(list(only.open(1))), flush=True)

        if __name__ == "__main__":
            main()
        else:
            time.sleep(0.4)  # as above: time enough for a signal before a worker is ready for it
    """)
    )
    with preloaded.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        for moment in ("opening\n", "opened\n"):
            assert child.stdout.readline() == moment
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                time.sleep(0.05)
                os.killpg(child.pid, number)
        assert child.stdout.readline() == "60 60\n"
        assert child.wait(timeout=60) == 0
        wait_for_the_end_of_a_group(child.pid)


def wait_for_the_end_of_a_group(group: int) -> None:
    """Wait until no process of a group is left: what multiprocessing has started notices the end of the main process."""
    deadline = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)


@START_METHODS
def test_a_worker_that_cannot_be_told_to_end_is_killed_and_the_program_ends(
    tmp_path: Path, method: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import ctypes, logging, pathlib, sys, time
        sys.path.insert(0, {str(TESTS)!r})
        here = pathlib.Path({str(tmp_path)!r})
        import torch.utils.data._utils
        from data.resumed import Samples
        from torch.utils.data import DataLoader
        from hookline.data.loaders import make_loaders

        class Stuck(Samples):
            def __getitem__(self, index):
                while index == 2:
                    if (here / "hold").exists():
                        (here / "held").touch()
                        ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
                    time.sleep(0.01)
                return super().__getitem__(index)

        def main():
            torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds that torch waits for a worker
            logging.basicConfig(stream=sys.stdout)
            source = DataLoader(Stuck(60), 1, num_workers=1, multiprocessing_context={method!r})
            (only,) = make_loaders(source, 1.0, "train")
            batches = only.open(0, 0, 5)
            print(len([next(batches), next(batches)]), flush=True)
            (here / "hold").touch()
            while not (here / "held").exists():
                time.sleep(0.01)
            only.close()
            print("closed", flush=True)

        if __name__ == "__main__":
            main()
    """)
    )
    with (tmp_path / "output").open("w") as output:
        child = preloaded.Popen(
            [sys.executable, script], stdout=output, stderr=output, start_new_session=True
        )
        try:
            assert child.wait(timeout=60) == 0
            wait_for_the_end_of_a_group(child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert "did not end and is killed" in (tmp_path / "output").read_text()


def test_a_program_that_a_worker_would_run_again_is_refused_there(tmp_path: Path) -> None:
    """Without `if __name__ == "__main__":`, on macOS, Windows and since Python 3.14."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        import multiprocessing
        from data.resumed import Samples
        from torch.utils.data import DataLoader
        from hookline import Trainer
        from hookline.testing import TinyModule

        multiprocessing.set_forkserver_preload(["__main__"])  # the default since Python 3.14
        source = DataLoader(Samples(6), 1, num_workers=1, multiprocessing_context="forkserver")
        Trainer(max_epochs=1, run_dir="run", enable_progress_bar=False).fit(TinyModule(), source)
    """)
    )
    done = preloaded.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "HooklineError: fit() was called by a process that Python starts for the workers of a loader. Such a "
        "process imports script.py, and must not train. In script.py, put what begins the training under `if "
        '__name__ == "__main__":`.'
    ) in done.stderr
    assert "RunLockedError" not in done.stderr
    # which of the processes has imported it depends on the version of Python
    assert "its own error is above" in done.stderr or "exited unexpectedly" in done.stderr


IN_A_CELL = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from hookline import OptionError
from tiny import Net, batches, quiet

class Cell(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(4), torch.ones(2)

class Pickled(Cell):
    def __reduce__(self):
        return TensorDataset, plain.tensors

def collate(items):
    return torch.utils.data.default_collate(items)

plain = TensorDataset(torch.ones(4, 4), torch.ones(4, 2))
with_transform = TensorDataset(torch.ones(4, 4), torch.ones(4, 2))
with_transform.transform = Cell()

def refused(dataset, start="spawn", workers=1, **options):
    loader = DataLoader(dataset, num_workers=workers, multiprocessing_context=start if workers else None, **options)
    try:
        quiet(max_steps=1).fit(Net(), loader)
    except OptionError as error:
        return str(error)
    return ""

for start in ("spawn", "forkserver"):
    said = refused(Cell(), start)
    assert f"'train' has num_workers=1, and {start!r} starts" in said and "cannot import Cell (in its dataset)" in said
    assert "from data import Cell" in said and "num_workers=0" in said, said
assert "Cell (in its dataset)" in refused(Subset(Cell(), [0, 1]))
assert "Cell (in its dataset)" in refused(Cell() + plain)
assert "Cell (in its dataset)" in refused(with_transform)
assert "collate (in its collate_fn)" in refused(plain, collate_fn=collate)
assert "collate (in its worker_init_fn)" in refused(plain, worker_init_fn=collate)
assert refused(Cell(), "fork") == refused(Cell(), workers=0) == ""
assert refused(Pickled()) == ""  # its worker is a new process, and it trains
print("DONE")
"""


def test_a_dataset_of_a_notebook_is_refused_if_its_workers_cannot_import_it() -> None:
    done = preloaded.run(
        [sys.executable, "-c", IN_A_CELL],  # like a notebook, its __main__ has no file
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    assert "DONE" in done.stdout, done.stderr
