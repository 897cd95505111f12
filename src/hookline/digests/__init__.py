"""Digests of training steps: how a run computes and writes them, and where two runs diverge.

`Trainer(digest=...)` attaches the recorder in digested steps only. May import: util, engine,
loggers, run, audit.
"""
