"""Rewinding: run a recorded run again to any step, with probes attached, and compare it with its log.

Nothing is written into the recorded run, and none of its loggers, uploads or messages act a second time.
May import: util, engine, loggers, distributed, run, checkpoint, control, training, config.
"""
