"""Signals, hangs, slow loaders; the summary that a run leaves.

This package observes the run; the loops decide. May import: util, engine, distributed, run, checkpoint.
"""
