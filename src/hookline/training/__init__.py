"""The loops, read top to bottom: fit, the step, evaluation, prediction; what a run saves and restores; the
trainer.

The step of one process knows nothing about ranks; `training/ranks` has what several ranks need. May import:
util, engine, metrics, loggers, distributed, data, run, checkpoint, reliability, tracing, control.
"""
