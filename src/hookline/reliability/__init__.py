"""Signals, the watchdog for hangs, advice for slow loaders, and the summary at the end of a run.

This package observes the run; the loops decide. May import: util, engine, distributed, run, checkpoint.
"""
