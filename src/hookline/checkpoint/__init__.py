"""Checkpoints: their format, manifest, writer and reader, sharded and remote ones, and weights alone.

No pickle is read or written, and a checkpoint that exists is complete. May import: util, engine, metrics,
distributed, run.
"""
