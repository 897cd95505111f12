"""Other trainers: their hooks and modules in Hookline's loop, and Hookline's hooks in their loops.

Their objects in our loop: `adapter`, `lightning` (except its `host`), `transformers.callbacks`, `keras`,
`kempnerforge`, `trainers`, `model_training_framework`, `demo`. Our hooks in their loops: `hosted`, `hosts`,
`loop` (`Line`, for loops written by hand), `accelerate`, `lightning.host`, `transformers.host`.

Each system has one file or folder, which is imported when it is used. May import: util, engine, metrics,
loggers, distributed, data, run, checkpoint, training, hooks, config.
"""
