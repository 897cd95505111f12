"""transformers: its callbacks in Hookline's trainer, and Hookline's hooks in its Trainer."""
