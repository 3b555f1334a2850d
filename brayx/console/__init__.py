"""The console: a control API over a job and its tracking store, and a page that uses the API.

Each subject is a module with its documents and its calls, and one of the same name in `brayx.console.page`.

The job's process imports only `brayx.console.job`, `brayx.console.live` and `brayx.console.port`. The API and the page
run in a separate process, which starts when somebody opens the console. Knows nothing of Ray.
"""
