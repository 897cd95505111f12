"""Hooks inside other trainers on two ranks: means are of both, and what one rank wants is done by both at the same batch."""

from __future__ import annotations

import pytest
from interop.processes import IMPORTED
from ranks.torchrun import Outcome, torchrun

SCRIPT = '''
    import logging, sys, warnings
    warnings.filterwarnings("ignore")
    import torch, accelerate, transformers
    import lightning.pytorch as lightning
    from interop.hosted import LightningNet, TransformersNet, loader, samples
    from tiny import batches
    import hookline
    from hookline import Hook
    from hookline.hooks import EarlyStopping, ModelCheckpoint

    logging.getLogger("lightning").setLevel(logging.ERROR)
    DATA = batches(12)

    class Tells(Hook):
        """Each host prints the same: where it validated and saved, what the mean is, and how it ended."""
        def __init__(self, host):
            super().__init__()
            self.host = host
        def say(self, *words):
            sys.stdout.write(" ".join(map(str, (self.host, *words))) + "\\n")
            sys.stdout.flush()
        def on_validation_end(self, metrics, rank, world_size):
            self.say("VAL", rank, world_size, round(metrics["val/loss"], 4))
        def on_checkpoint_save(self, rank, step, reason):
            self.say("SAVED", rank, step, reason)
        def on_train_epoch_end(self, metrics, rank):
            self.say("EPOCH", rank, round(metrics["train/loss"], 4))
        def on_train_end(self, rank, step, status, trainer):
            self.say("END", rank, step, status, trainer.stop_reason)

    class OnlyFirst(Hook):
        """One rank alone asks for something, in the middle of the second epoch."""
        ranks = "zero"
        def on_step_end(self, step, trainer):
            if step == 3:
                trainer.save_checkpoint()
            if step == 8:
                trainer.stop("enough")

    def hooks(host):
        return [Tells(host), OnlyFirst(), EarlyStopping("val/loss", patience=9),
                ModelCheckpoint(monitor="val/loss", save_top_k=1)]

    def in_lightning():
        callback = hookline.hosts.lightning(hooks("lightning"), run_dir="in_lightning")
        trainer = lightning.Trainer(
            callbacks=[callback], accelerator="cpu", devices=2, strategy="ddp", max_epochs=9, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
        trainer.fit(LightningNet(), loader(DATA), loader(DATA[:4]))

    def in_transformers():
        callback = hookline.hosts.transformers(hooks("transformers"), run_dir="in_transformers")
        arguments = transformers.TrainingArguments(
            "out", num_train_epochs=9, per_device_train_batch_size=3, per_device_eval_batch_size=3, eval_strategy="epoch",
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.0, logging_strategy="no")
        net = TransformersNet()
        trainer = transformers.Trainer(
            model=net, args=arguments, train_dataset=samples(DATA), eval_dataset=samples(DATA[:4]), callbacks=[callback],
            optimizers=(torch.optim.SGD(net.parameters(), lr=0.1), None))
        with callback:
            trainer.train()

    def on_accelerate():
        accelerator = accelerate.Accelerator(cpu=True)
        line = hookline.hosts.accelerate(accelerator, hooks=hooks("accelerate"), run_dir="on_accelerate")
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        pairs = [(x, y) for xs, ys in DATA for x, y in zip(xs, ys)]
        loaders = [torch.utils.data.DataLoader(each, batch_size=3) for each in (pairs, pairs[:12])]
        net, sgd, data, val = line.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), *loaders)
        with line:
            for _ in line.epochs(9):
                for x, y in line.epoch(data):
                    sgd.zero_grad()
                    line.backward(torch.nn.functional.mse_loss(net(x), y))
                    sgd.step()
                for x, y in line.validation(val):
                    line.log("val/loss", torch.nn.functional.mse_loss(net(x), y))

    in_lightning()
    on_accelerate()
    in_transformers()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
'''
HOSTS = ["lightning", "accelerate", "transformers"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return torchrun(SCRIPT, tmp_path_factory.mktemp("job"), deadline=300, **IMPORTED)


def told(job: Outcome, host: str, what: str) -> dict[str, list[str]]:
    """What each rank said, by its number."""
    said: dict[str, list[str]] = {"0": [], "1": []}
    for line in job.lines(f"{host} {what}"):
        rank, _, rest = line.partition(" ")
        said[rank].append(rest)
    return said


def test_it_runs_to_its_end(job: Outcome) -> None:
    assert job.code == 0, job.output


@pytest.mark.parametrize("host", HOSTS)
def test_a_stop_that_one_rank_asks_for_in_an_epoch_ends_both_at_the_same_step(
    host: str, job: Outcome
) -> None:
    ends = told(job, host, "END")
    assert ends["0"] == ends["1"] and len(ends["0"]) == 1
    step, status, reason = ends["0"][0].split(" ", 2)
    assert 8 <= int(step) <= 10 and status == "stopped" and reason == "enough (requested by rank 0)"


@pytest.mark.parametrize("host", HOSTS)
def test_means_are_those_of_both_ranks(host: str, job: Outcome) -> None:
    for what in ("VAL", "EPOCH"):
        both = told(job, host, what)
        assert both["0"] == both["1"] and both["0"], (what, both)


@pytest.mark.parametrize("host", HOSTS)
def test_a_checkpoint_that_one_rank_asks_for_is_written_once_and_told_to_both(
    host: str, job: Outcome
) -> None:
    saved = told(job, host, "SAVED")
    assert saved["0"] == saved["1"]
    first = saved["0"][0].split()
    assert first[1] == "manual" and 3 <= int(first[0]) <= 5
    assert any(each.endswith("best") for each in saved["0"])  # as the mean of both ranks decides
