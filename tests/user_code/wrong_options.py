"""Every line marked `# wrong` must be flagged by both type checkers, and no other."""

from __future__ import annotations

from hookline import Metrics, StepContext, Trainer, every, once

Trainer(max_epoch=3)  # wrong
Trainer(max_epochs="three")  # wrong
Trainer(max_epochs=1.5)  # wrong
Trainer(limit_train_batches="all")  # wrong
Trainer(enable_progress_bar="yes")  # wrong
Trainer(compile="fast")  # wrong
Trainer(logger=5)  # wrong
Trainer(hooks=5)  # wrong
Trainer(strategy=7)  # wrong
Trainer(precision=None)  # wrong
Trainer(5)  # wrong
Trainer(run_dir=5)  # wrong

trainer = Trainer(max_epochs=3, limit_train_batches=0.5, seed=1)
trainer.ftt()  # wrong
trainer.fit(5)  # wrong
trainer.on("step_end", evry=3)  # wrong
trainer.add_hook(print, nme="x")  # wrong
trainer.save_checkpoint(5)  # wrong
trainer.current_epoch.upper()  # wrong
every(1.5)  # wrong
every(every="5 steps")  # wrong
once(5)  # wrong


def listens(metrics: Metrics, ctx: StepContext) -> None:
    metrics["loss"].upper()  # wrong
    ctx.grad_nrm  # wrong
