"""Gives ranks the time of a busy machine to end by themselves after another one has failed. Imported in a job's script.

When a rank is woken stays the same; when it is ended by force, and when it stops waiting for the name of the dead, is later.
"""

from __future__ import annotations

from hookline.loops import peers

LATER = 15.0

peers.PATIENCE += LATER
peers.PATIENCE_WITH_THE_DEAD += LATER
peers.OWN_PATIENCE += LATER
peers.WAKING += LATER
peers.SILENCE += LATER
