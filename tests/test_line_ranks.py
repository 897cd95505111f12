"""A hand-written loop on several ranks: hooks see the means of all of them, and agree on the end."""

from __future__ import annotations

import pytest
from ranks.torchrun import Outcome, torchrun

LOOP = '''
    import sys
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from tiny import batches
    from hookline import Hook, Line
    from hookline.hooks import EarlyStopping, ModelCheckpoint

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    def say(*words):  # in one piece, however many ranks speak at once
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    class OnlyFirst(Hook):
        ranks = "zero"
        def on_train_start(self, rank):
            say("FIRST", rank)

    class Tells(Hook):
        def on_validation_end(self, metrics, epoch, rank, world_size):
            say("VAL", epoch, rank, world_size, round(metrics["val/loss"], 4))
        def on_checkpoint_save(self, rank, path):
            say("SAVED", rank, path.is_dir())

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    wrapped = DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    line = Line(wrapped, sgd, hooks=[OnlyFirst(), Tells(), EarlyStopping("val/loss", patience=1), ModelCheckpoint()])
    with line:
        for epoch in line.epochs(9):
            for x, y in line.epoch(batches(2)):
                sgd.zero_grad()
                line.backward(torch.nn.functional.mse_loss(wrapped(x + rank), y))
                sgd.step()
            for _ in line.validation([0]):
                line.log("val/loss", [1.0, 4.0][rank] if epoch == 0 else [6.0, 0.0][rank])  # better on one rank, worse on the mean
    say("END", rank, line.status, line.state.epochs_seen)
    say("DIR", line.run_dir)
    distributed.destroy_process_group()
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return torchrun(LOOP, tmp_path_factory.mktemp("job"), deadline=100)


def test_it_runs_to_its_end_on_every_rank(job: Outcome) -> None:
    assert job.code == 0, job.output
    assert job.lines("END") == ["0 stopped 2", "1 stopped 2"]


def test_decisions_rest_on_the_mean_of_all_ranks(job: Outcome) -> None:
    assert job.lines("VAL") == ["0 0 2 2.5", "0 1 2 2.5", "1 0 2 3.0", "1 1 2 3.0"]


def test_hooks_for_the_first_rank_are_heard_there_only(job: Outcome) -> None:
    assert job.lines("FIRST") == ["0"]


def test_they_write_into_one_directory(job: Outcome) -> None:
    assert len(job.lines("DIR")) == 2 and len(set(job.lines("DIR"))) == 1


def test_a_checkpoint_is_written_once_and_told_everywhere(job: Outcome) -> None:
    assert job.lines("SAVED") and set(job.lines("SAVED")) == {"0 True", "1 True"}
