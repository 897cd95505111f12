"""A run that another loop drives: Hookline's events, emitted for a host."""
