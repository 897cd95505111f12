"""One run: its options, state, module, optimizers, directory, record and the parts that the loops work with.

The loops write the state and hooks read it; each field has one owner. May import: util, engine, metrics,
loggers, distributed, data.
"""
