"""The loops, read from top to bottom: fit, the step, evaluation, prediction; saves and resumes; the trainer.

The step of one process has no code for several ranks; that is in `training/ranks`. May import: util, engine,
metrics, loggers, distributed, data, run, checkpoint, reliability, tracing, audit, digests,
control.
"""
