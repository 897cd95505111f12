"""transformers in both directions.

Their objects in our loop: `callbacks` adopts a TrainerCallback as a hook, with the args, state and control
that it sees. Our hooks in their loop: `host` is a TrainerCallback that emits Hookline's events; it observes
the model for events that callbacks do not receive.
"""
