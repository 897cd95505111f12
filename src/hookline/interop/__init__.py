"""Other trainers: their hooks and modules in Hookline's loop, Hookline's hooks in their loops and in loops
written by hand.

Each system has one file or folder; none of them is imported until it is used. May import: util, engine,
metrics, loggers, distributed, data, run, checkpoint, training, hooks, config.
"""
