"""Gives ranks the time of a busy machine to end by themselves after another one has failed. Imported in a job's script.

When a rank is woken stays the same; when it is ended by force, and when it stops waiting for the name of the dead, is later.
"""

from __future__ import annotations

from hookline.training.ranks import failure_monitor

LATER = 15.0

failure_monitor.RANK_TIMEOUT += LATER
failure_monitor.DEAD_RANK_TIMEOUT += LATER
failure_monitor.OWN_TIMEOUT += LATER
failure_monitor.WAKING += LATER
failure_monitor.DEATH_REPORT_SECONDS += LATER
