"""A run that is rewound to any step has the weights, the optimizer state, the random streams and the log of that step.

`python3 dev.py rewinds` tries 100 steps; the suite tries fewer.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks.torchrun import torchrun
from rewind.rewound_runs import KINDS, check_rewinds, choose_steps, record, tree

COUNT = int(os.environ.get("HOOKLINE_REWINDS", "25"))
"""The number of rewinds, over all kinds of runs."""

PARTS = """
from rewind.rewound_runs import Noisy, data
from hookline import DataModule

class Net(Noisy): ...

class Data(DataModule):
    def train_dataloader(self): return data("averaged")["train"]
"""
RUN = """
module = "parts.Net"
datamodule = "parts.Data"
[trainer]
max_epochs = 2
seed = 1
run_dir = "runs/two"
log_every_n_steps = 1
enable_progress_bar = false
[hooks.model_checkpoint]
every_n_train_steps = 3
save_top_k = -1
"""
PROBE = """
from hookline import Hook

class Probe(Hook):
    def on_step_end(self, step): print("probe at", step)
"""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ranks"])
def test_a_run_is_rewound_to_any_of_its_steps_bit_for_bit(kind: str, tmp_path: Path) -> None:
    digests = record(kind, tmp_path / "run")
    before = tree(tmp_path / "run")
    share = max(1, COUNT // len(KINDS))
    assert check_rewinds(kind, tmp_path / "run", digests, choose_steps(kind, digests, share)) >= 2 * share
    assert tree(tmp_path / "run") == before, "something was written into the recorded run"


def test_two_ranks_are_rewound_bit_for_bit(tmp_path: Path) -> None:
    count = max(1, COUNT // len(KINDS))
    source = f"""
        import os
        from pathlib import Path
        import torch
        from hookline.cli import main
        from rewind.rewound_runs import check_rewinds, choose_steps, record, tree

        folder = Path({str(tmp_path / "run")!r})
        digests = record("ranks", folder)
        torch.distributed.barrier()  # rank zero writes last
        before = tree(folder)
        check_rewinds("ranks", folder, digests, choose_steps("ranks", digests, {count}))
        assert tree(folder) == before
        print("checked", {count}, flush=True)

        os.chdir(folder.parent)
        assert main(["fit", "run.toml"]) == 0
        torch.distributed.barrier()
        before = tree(Path("runs"))
        assert main(["rewind", "two", "--to", "5", "--with", "probe.py:Probe"]) == 0
        torch.distributed.barrier()
        assert tree(Path("runs")) == before
    """
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "probe.py").write_text(PROBE)
    done = torchrun(source, tmp_path)
    assert done.code == 0, done.output
    assert done.lines("checked") == [str(count)] * 2
    assert done.lines("probe at") == ["4", "5"], "rank zero prints, and it alone"
    assert done.lines("rewound runs/two") == [
        "to step 5: 2 updates from runs/two/checkpoints/epoch=0-step=3 (step 3)"
    ]
    assert done.lines("equal to the bit") == ["."]
