"""The console of an actor on Serve, at the job's own `console_port`.

- {name: console, route_prefix: null, import_path: deployments.console:app, args: {config: match/match.yaml}}
"""

from brayx.cluster.console_app import ConsoleArgs as ConsoleArgs
from brayx.cluster.console_app import app as app
