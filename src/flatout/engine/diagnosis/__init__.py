"""Checks of the machine, the installation and the settings, each a small function.

`fail`: a run would stop, or compute something else than was asked. `warn`: it runs,
with less. Nothing here raises; nothing is changed but a file of 32 MB that is gone
again.
"""
