"""A run as a timeline: every event and call with time, step, rank and facts, in a format that trace viewers
open.

`replay` plays a timeline to a hook, without a model. May import: util, engine, metrics, run.
"""
