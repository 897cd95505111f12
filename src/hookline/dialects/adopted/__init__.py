"""Hooks, modules and data modules of other packages, as they are, in Hookline's trainer. None of these is
imported here.
"""
