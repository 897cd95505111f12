"""Signals, hangs, slow loaders; the summary that a run leaves.

It observes the run; the loops decide. May import: util, engine, distributed, run, checkpoint.
"""
