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
        from pathlib import Path
        import torch
        from rewind.rewound_runs import check_rewinds, choose_steps, record, tree

        folder = Path({str(tmp_path / "run")!r})
        digests = record("ranks", folder)
        torch.distributed.barrier()  # rank zero writes last
        before = tree(folder)
        check_rewinds("ranks", folder, digests, choose_steps("ranks", digests, {count}))
        assert tree(folder) == before
        print("rewound", {count}, flush=True)
    """
    done = torchrun(source, tmp_path)
    assert done.code == 0, done.output
    assert done.lines("rewound") == [str(count)] * 2
