"""Serve applications that users name in `serve run` and its YAML; the code is in `brayx.cluster`."""
