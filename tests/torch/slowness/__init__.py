"""Trials of `hvd.slowness()`; see `__main__`."""
