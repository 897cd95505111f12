"""Checkpoints: format, manifest, writer and reader; sharded, remote and partial ones; exports and imports.

No pickle is read or written, and a checkpoint that exists is complete. May import: util, engine, metrics,
distributed, run.
"""
