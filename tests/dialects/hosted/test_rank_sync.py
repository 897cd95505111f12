"""A hand-written loop on several ranks: hooks see the means of all of them, and agree on the end."""

from __future__ import annotations

from typing import Any, cast

import pytest
from distributed.threads import on_ranks
from ranks.torchrun import Outcome, torchrun

from hookline.distributed.comm import Ranks
from hookline.interop.hosted.rank_sync import HostedRankSync

LOOP = """
    import sys
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from tiny import batches
    from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, Hook, HooklineError, Line
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

    # what one rank alone wants
    class StopsFirst(Hook):
        ranks = "zero"
        def on_step_end(self, step, trainer):
            if step == 2:
                trainer.stop("enough")

    class SavesOnSecond(Hook):
        def on_step_end(self, step, trainer, rank):
            if step == 2 and rank == 1:
                trainer.save_checkpoint()
        def on_checkpoint_save(self, step, rank):
            say("ONCE", rank, step)

    class Skips(Hook):
        steers = True
        def on_before_optimizer_step(self, rank, batches_seen):
            return SKIP_STEP if rank == 1 and batches_seen == 1 else None

    class Ends(Hook):
        steers = True
        def on_train_batch_start(self, rank, batch_idx):
            return END_EPOCH if rank == 1 and batch_idx == 3 else SKIP_BATCH if rank == 0 and batch_idx == 1 else None

    def run(name, hooks, sizes=(5, 5), spread=True, validating=()):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        wrapped = DistributedDataParallel(net) if spread else net
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        line = Line(wrapped, sgd, hooks=hooks)
        try:
            with line:
                for _ in line.epochs(2):
                    for x, y in line.epoch(batches(sizes[rank])):
                        sgd.zero_grad()
                        line.backward(torch.nn.functional.mse_loss(wrapped(x + rank), y))
                        sgd.step()
                    for _ in line.validation([0]) if rank in validating else ():
                        pass
        except HooklineError as error:
            say(name, rank, error)
        else:
            say(name, rank, line.global_step, line.stop_reason)
        say(name + "-WEIGHTS", round(net.weight.sum().item(), 5))

    run("STOP", [StopsFirst()])
    run("SAVE", [SavesOnSecond()])
    run("SKIP", [Skips()])
    run("LEFT", [Ends()])
    run("UNEVEN", [], sizes=(5, 2), spread=False)
    run("ALONE", [], validating=[0])
    distributed.barrier()
    distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return torchrun(LOOP, tmp_path_factory.mktemp("job"), deadline=300)


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


def test_different_numbers_of_batches_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def compare(ranks: Ranks) -> None:
        sync = HostedRankSync(cast("Any", None), ranks)
        for lengths in ([5, 5], [10, None], [10, 7], [10, 7]):
            sync.compare_lengths(lengths[ranks.rank])

    assert on_ranks(2, compare) == [None, None]
    (said,) = caplog.messages
    assert "10 on rank 0, 7 on rank 1" in said and "hangs after 7 batches. Shard the data" in said


# ---- what one rank alone wants ----------------------------------------------------------------------------------------------


def test_a_stop_in_the_middle_of_an_epoch_is_agreed_on(job: Outcome) -> None:
    zero, one = job.lines("STOP ")
    assert zero.split(" ", 1)[1] == one.split(" ", 1)[1]
    step, reason = zero.split(" ", 2)[1:]
    assert 2 <= int(step) <= 4 and reason == "enough (requested by rank 0)"


def test_a_checkpoint_is_written_by_all_together(job: Outcome) -> None:
    first, second = (each.split() for each in job.lines("ONCE "))
    assert first[1] == second[1] and 2 <= int(first[1]) <= 4


def test_an_update_that_one_rank_leaves_out_is_left_out_by_both(job: Outcome) -> None:
    assert job.lines("SKIP ") == ["0 9", "1 9"]


def test_a_batch_and_an_epoch_are_left_out_by_both(job: Outcome) -> None:
    assert job.lines("LEFT ") == ["0 4", "1 4"]


@pytest.mark.parametrize("what", ["STOP", "SAVE", "SKIP", "LEFT"])
def test_their_weights_stay_the_same(what: str, job: Outcome) -> None:
    weights = job.lines(f"{what}-WEIGHTS")
    assert len(weights) == 2 and len(set(weights)) == 1


def test_epochs_may_differ_in_length_where_nothing_else_ties_the_ranks(job: Outcome) -> None:
    assert job.lines("UNEVEN ") == ["0 10", "1 4"]


def test_a_validation_on_one_rank_only_is_an_error_on_both_and_no_hang(job: Outcome) -> None:
    said = job.lines("ALONE ")
    assert len(said) == 2 and all("out of step: one is at a validation" in each for each in said)
