"""Traces: every event and call of a run with time, step, rank and facts, in a format for trace viewers.

`replay` runs a hook on a recorded trace, without a model. May import: util, engine, metrics, run.
"""
