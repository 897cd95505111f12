"""One run: its options, state, module, optimizers, directory and record, and the objects that the loops use.

The loops write the state and hooks read it; each field has one owner. May import: util, engine, metrics,
loggers, distributed, data.
"""
