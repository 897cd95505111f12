"""What hooks are told inside other trainers are the trainers' own numbers, also after a resume in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import transformers
from interop.hosted import DATA, LightningNet, lightning_trainer, loader

import hookline
from hookline import Hook
from hookline.hooks import GradientMonitor

pytestmark = pytest.mark.filterwarnings("default")


class Facts(Hook):
    """Losses, norms and means by their step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, tuple[float, float]] = {}
        self.epochs: list[float] = []
        self.heard: list[tuple[str, int]] = []

    def on_train_epoch_start(self, epoch: int) -> None:
        self.heard.append(("epoch", epoch))

    def on_train_batch_start(self, batch_idx: int) -> None:
        self.heard.append(("batch", batch_idx))

    def on_step_end(self, step: int, loss: float, grad_norm: float) -> None:
        self.steps[step] = loss, grad_norm

    def on_train_epoch_end(self, metrics: Any) -> None:
        self.epochs.append(metrics["train/loss"])


class Logged(transformers.TrainerCallback):
    """What transformers itself logs."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.steps[state.global_step] = dict(logs)


def texts(n: int) -> list[dict[str, Any]]:
    """With as many labels in each as makes a mean over batches wrong."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for index in range(n):
        ids = torch.randint(0, 20, (8,), generator=draw)
        labels = ids.clone()
        labels[: index % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def language_model(
    hooks: list[Any], folder: Path, resume: Any = None, window: int = 2, **options: Any
) -> Logged:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    logged, callback = Logged(), hookline.hosts.transformers(hooks)
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": window,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "max_grad_norm": 0.5,
            **options,
        }
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=texts(14),
        callbacks=[callback, logged],
    )
    with callback:
        trainer.train(resume_from_checkpoint=resume)
    return logged


@pytest.mark.parametrize("window", [1, 3])
def test_losses_and_norms_are_those_that_transformers_logs_itself(window: int, tmp_path: Path) -> None:
    """Its loss counts tokens over the whole window, and it clips before any callback is told of the gradients."""
    facts = Facts()
    logged = language_model([facts], tmp_path, window=window)
    assert len(facts.steps) == 2 * -(-7 // window)
    for step, (loss, norm) in facts.steps.items():
        assert loss == pytest.approx(logged.steps[step]["loss"], rel=1e-5)
        assert norm == pytest.approx(logged.steps[step]["grad_norm"], rel=1e-4)
    assert max(norm for _, norm in facts.steps.values()) > 0.5


def test_what_a_hook_logs_does_not_spoil_what_transformers_logs(tmp_path: Path) -> None:
    alone = language_model([], tmp_path).steps
    beside = language_model([GradientMonitor(log_frequency=1)], tmp_path).steps
    for step, row in alone.items():
        same = {key: value for key, value in beside[step].items() if key in row}
        assert same == pytest.approx(row, rel=1e-4)
        assert not {"train/loss", "lr"} & set(beside[step])  # they are there as `loss` and `learning_rate`
        assert any(key.startswith("grad_norm/") for key in beside[step])


def test_a_hook_that_fails_before_an_update_fails_the_run(tmp_path: Path) -> None:
    class Fails(Hook):
        def on_before_optimizer_step(self) -> None:
            raise ValueError("mine")

        def on_exception(self, exception: BaseException) -> None:
            self.heard = exception

    hook = Fails()
    with pytest.raises(ValueError, match="mine") as caught:
        language_model([hook], tmp_path)
    assert hook.heard is caught.value
    assert any(
        "raised by hook 'fails' in on_before_optimizer_step" in each for each in caught.value.__notes__
    )


def test_transformers_continues_in_the_middle_of_an_epoch_with_everything_it_had(
    tmp_path: Path, caplog: Any
) -> None:
    whole, monitor = Facts(), GradientMonitor(log_frequency=1)
    language_model([whole, monitor], tmp_path, save_strategy="steps", save_steps=3)
    assert "cannot hold" not in caplog.text  # tensors in the state of a hook are kept
    rest, later = Facts(), GradientMonitor(log_frequency=1)
    language_model([rest, later], tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert rest.epochs == pytest.approx(whole.epochs)
    assert rest.heard[:2] == [("epoch", 0), ("batch", 6)]
    assert list(rest.steps) == [4, 5, 6, 7, 8]
    assert later.history.steps == monitor.history.steps == list(range(1, 9))


def test_an_epoch_that_lightning_resumes_in_the_middle_is_told_from_its_start_to_its_end(
    tmp_path: Path,
) -> None:
    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    facts = Facts()
    lightning_trainer([hookline.hosts.lightning([Facts()]), Saves()], max_epochs=1).fit(
        LightningNet(), loader(DATA)
    )
    callback = hookline.hosts.lightning([facts])
    lightning_trainer([callback], max_epochs=1).fit(
        LightningNet(), loader(DATA), ckpt_path=tmp_path / "mid.ckpt"
    )
    assert facts.heard == [("epoch", 0), ("batch", 2), ("batch", 3), ("batch", 4)]
    assert len(facts.epochs) == 1 and callback.line.state.batches_seen == len(DATA)


def test_lightning_s_own_metrics_are_logged_once(tmp_path: Path) -> None:
    class Logs(LightningNet):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", super().validation_step(batch, batch_idx))

    class Rows(lightning.loggers.CSVLogger):
        seen: list[dict[str, float]]

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.seen.append(dict(metrics))

    rows = Rows(str(tmp_path))
    rows.seen = []
    callback = hookline.hosts.lightning([Facts()])
    lightning_trainer([callback], max_epochs=2, logger=rows).fit(Logs(), loader(DATA), loader(DATA[:2]))
    assert sum("val_loss" in row for row in rows.seen) == 2
    assert callback.line.state.stage == "fit" and type(callback.line.state.stage) is str
