"""Serve applications, a page each: arguments in, application out; the code is in `brayx.cluster`."""
