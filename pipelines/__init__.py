"""Modules that users name in `python -m` and imports, and the templates; the code is in `brayx`."""
