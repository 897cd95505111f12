"""Loaders and batches: how they are read, ordered, sharded over ranks, mixed and resumed; random streams.

The order of samples is a function of seed, epoch and position. May import: util, engine, distributed.
"""
