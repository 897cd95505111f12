"""Who a process is in its job, from the environment that torchrun or SLURM made."""

from __future__ import annotations

import pytest
import torch

from hookline import DDP, FSDP, Accelerated, OptionError, Trainer
from hookline.distributed.launch import RankInfo, find_rank, first_host

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}


def test_a_process_without_a_launcher_is_alone() -> None:
    assert find_rank({}) == RankInfo()
    assert find_rank({}).alone


def test_torchruns_variables_say_who_it_is() -> None:
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert find_rank(env) == RankInfo(3, 1, 4, 2, "torchrun")
    assert find_rank({**SRUN, **env}).launcher == "torchrun"  # torchrun inside a SLURM job


def test_sruns_variables_say_who_it_is_and_where_to_meet() -> None:
    place = find_rank(SRUN)
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (5, 1, 8, 2)
    assert place.rendezvous_address == "gpu03:20123"
    assert find_rank({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "777"}).rendezvous_address == "head:777"


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_NAME": "interactive"},
        {"SLURM_STEP_ID": "4294967291"},
    ],
)
def test_a_shell_in_an_allocation_is_no_task_of_the_job(changed: dict[str, str]) -> None:
    assert find_rank({**SRUN, **changed}).alone


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("a1,a2", "a1"),
        ("n[1,2]x,b", "n1x"),
        ("one.host", "one.host"),
        ("r-[7-9]", "r-7"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_variables_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="RANK='one', which is not a whole number"):
        find_rank({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(OptionError, match="rank 2 of 2 processes"):
        find_rank({"RANK": "2", "WORLD_SIZE": "2"})


# ---- strategies by name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FSDP(replicas=3), "replicas=3 must be a whole number that divides the 1 ranks"),
        (lambda: FSDP(wrap=3), "wrap=3 must be a pattern of names"),  # type: ignore[arg-type]
        (lambda: FSDP(device="cpu", offload=True), "the device is the CPU"),
        (lambda: DDP(timeout=0), "timeout=0 must be a number of seconds above 0"),
        (lambda: DDP(precision="8"), "precision='8', allowed"),
        (lambda: Accelerated(object(), device="cpu"), "brings its own device and precision"),
        (
            lambda: Trainer(strategy=DDP(), precision="bf16-mixed"),
            "cannot be combined with a strategy object",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(make: object, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "accelerate"])
def test_on_one_process_they_train_like_any_other(strategy: str) -> None:
    from tiny import Net, batches, quiet

    def trained(name: str) -> torch.Tensor:
        torch.manual_seed(0)
        net = Net()
        quiet(strategy=name, max_epochs=2).fit(net, batches())
        return net.layer.weight.detach()

    assert torch.equal(trained(strategy), trained("single"))
