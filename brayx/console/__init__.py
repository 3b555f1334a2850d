"""The console: a control API over a job and its tracking store, and a page that uses it.

The job's process imports only `brayx.console.live`, `brayx.console.link` and `brayx.console.port`; the API and the page
run in a process of their own, which starts when somebody opens the console. Knows nothing of Ray.
"""
