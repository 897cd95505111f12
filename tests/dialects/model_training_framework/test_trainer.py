"""`GenericTrainer`: runs, resumes and early stopping under the names of the Model Training Framework."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from dialects.model_training_framework.documented import Coder, make, scores, silent, training_step
from tiny import batches
from torch import nn

from hookline import CheckpointError, OptionError, Preempted
from hookline.interop.model_training_framework import (
    GenericTrainer,
    GenericTrainerConfig,
    PreemptionConfig,
    TrainerHooks,
    ValAggregation,
)

# ---- the configuration -----------------------------------------------------------------------------------------------


def test_a_second_trainer_in_the_same_folder_trains_its_own_model(caplog: pytest.LogCaptureFixture) -> None:
    make(GenericTrainerConfig()).fit([batches(4)], max_epochs=1)
    second = make(GenericTrainerConfig(), model=nn.Linear(4, 2))  # not even of the same shape
    before = second._net.weight.detach().clone()
    second.fit([batches(2)], max_epochs=1)
    assert second.global_step == 2 and not torch.equal(second._net.weight, before)
    assert 'resume_from_checkpoint="latest"' in caplog.text and "completed at step 4" in caplog.text
    again = make(GenericTrainerConfig(), model=nn.Linear(4, 2))
    again.fit([batches(2)], max_epochs=1, resume_from_checkpoint="latest")
    assert again.global_step == 2 and torch.equal(again._net.weight, second._net.weight)


def test_a_job_that_slurm_has_started_again_continues_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    make(GenericTrainerConfig()).fit([batches(4)], max_epochs=1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trainer = make(GenericTrainerConfig())
    trainer.fit([batches(4)], max_epochs=2)
    assert trainer.state.resumed and trainer.global_step == 8
    for config in (PreemptionConfig(resume_from_latest_symlink=False), PreemptionConfig(requeue_job=False)):
        anew = make(GenericTrainerConfig(preemption=config))
        anew.fit([batches(4)], max_epochs=1)
        assert not anew.state.resumed and anew.global_step == 4


def test_a_preempted_run_with_automatic_resume_continues_where_it_was_and_a_finished_one_trains_nothing() -> (
    None
):
    class Preempts(TrainerHooks):
        def on_train_batch_end(
            self,
            trainer: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
            dataloader_name: str,
            metrics: Any,
        ) -> None:
            batches_seen.append(batch_idx)
            if len(batches_seen) == 3:
                signal.raise_signal(signal.SIGUSR1)

    batches_seen: list[int] = []
    config = GenericTrainerConfig(preemption=PreemptionConfig(resume_from_latest_symlink=True))
    with pytest.raises(Preempted):
        make(config, Preempts()).fit([batches(4)], max_epochs=2)
    for expected in (8, 8):
        trainer = make(config, Preempts())
        trainer.fit([batches(4)], max_epochs=2)
        assert len(batches_seen) == expected and trainer.global_step == 8
    assert batches_seen == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(CheckpointError) as failure:
        make(config, model=nn.Linear(4, 2)).fit([batches(4)], max_epochs=2)
    assert "to start a new run, give it another experiment_name" in failure.value.__notes__[-1]
    anew = make(GenericTrainerConfig(preemption=PreemptionConfig(resume_from_latest_symlink=False)))
    anew.fit([batches(1)], max_epochs=1)
    assert anew.global_step == 1


def test_a_run_resumes_from_the_checkpoint_it_is_given() -> None:
    make(GenericTrainerConfig()).fit([batches(2)], max_epochs=3)
    trainer = make(GenericTrainerConfig())
    trainer.fit(
        [batches(2)],
        max_epochs=3,
        resume_from_checkpoint="checkpoints/experiment/checkpoints/epoch_000_step_000002.ckpt",
    )
    assert trainer.global_step == 6 and trainer.state.resumed
    trainer.fit([batches(2)], max_epochs=4, resume_from_checkpoint="latest")
    assert trainer.global_step == 8


def test_the_trainers_own_early_stopping_works_with_its_default_metric() -> None:
    trainer = make(silent(early_stopping_patience=2))
    trainer.fit([batches(1)], [batches(1)], max_epochs=9)
    assert trainer.status == "stopped" and trainer.state.epochs_seen == 3


# ---- wrong use -------------------------------------------------------------------------------------------------------


def test_a_run_without_a_step_says_which_one_is_missing() -> None:
    model = Coder()
    trainer = GenericTrainer(silent(), model, torch.optim.SGD(model.parameters(), lr=0.1), logger=False)
    with pytest.raises(OptionError, match="call trainer.set_training_step"):
        trainer.fit([batches(1)])
    trainer.set_training_step(training_step)
    with pytest.raises(OptionError, match="call trainer.set_validation_step"):
        trainer.fit([batches(1)], [batches(1)])
    with pytest.raises(OptionError, match="aggregation=CUSTOM needs aggregation_fn"):
        trainer.set_validation_step(scores(1.0))
        trainer.config.validation.aggregation = ValAggregation.CUSTOM
        trainer.fit([batches(1)], [batches(1)])
