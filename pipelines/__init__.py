"""What `python -m` runs, and the templates; each module is a page over `brayx.commands`."""
