"""A loop on several ranks, one of which is killed or fails: the others name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.torchrun import torchrun

SCRIPT = """
    import os, signal, sys
    import torch
    import ranks.patient
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from hookline import Hook, Line, PeerError

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher would be faster than the message

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    class Tells(Hook):
        def on_exception(self, exception):
            say("HOOK", rank, type(exception).__name__)

    net = DistributedDataParallel(torch.nn.Linear(4, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with Line(net, sgd, hooks=[Tells()]) as line:
            for number in line.epoch(range(4)):
                if number == 2 and rank == 1 and sys.argv[1] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == 2 and rank == 1:
                    raise ValueError("the disk is full")
                sgd.zero_grad()
                line.backward(net(torch.ones(3, 4)).sum())
                sgd.step()
    except PeerError as error:
        say("PEER", rank, error, type(error.__cause__).__name__)
        os._exit(0)  # the others are gone, so the group cannot end in good order
"""


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_other_ranks_name_the_rank_that_failed(how: str, tmp_path: Path) -> None:
    job = torchrun(SCRIPT, tmp_path, how, ranks=3 if how == "killed" else 2)
    text = "it died without a message: it was killed" if how == "killed" else "ValueError: the disk is full."
    said = job.lines("PEER")
    assert [each[0] for each in said] == (["0", "2"] if how == "killed" else ["0"]), job.output
    assert all(f"Rank 1 has failed: {text}" in each for each in said), job.output
    assert [each for each in job.lines("HOOK") if "PeerError" in each][0] == "0 PeerError"
    if how == "raises":
        assert all(each.endswith("without it. RuntimeError") for each in said)
