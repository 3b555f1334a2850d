"""The console of an actor on Serve, at the job's own `console_port`.

- {name: console, route_prefix: null, import_path: deployments.console:app, args: {config: match/match.yaml}}
"""

from brayx.cluster.serving import ConsoleArgs
from brayx.cluster.serving import console_app as app

__all__ = ["ConsoleArgs", "app"]
