"""Our hooks in their loop: a run that another loop drives, with Hookline's events emitted for that host.

`host` says which events each host offers; `run` and `batch` emit them and write rows; `view` is the `trainer`
that hooks see; `checkpoints` saves and restores; `rank_sync` synchronizes several ranks.
"""
