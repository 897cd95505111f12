"""The loops. They read top to bottom: order of events is order of lines."""
