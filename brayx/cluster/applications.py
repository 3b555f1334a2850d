"""Starts and deletes Serve applications, each within a deadline.

Serve's own calls wait a minute or forever, for CPUs that no node has or for a controller that hangs. Knows nothing of
what an application serves. Tests: `tests/integration/test_remote_model_killed.py`.
"""

from __future__ import annotations

import logging
import time

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from brayx.cluster import ray_private
from brayx.errors import StartupError, first_line

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


def start_application(
    application: serve.Application, name: str, route_prefix: str | None, until: float, *, what: str = ""
) -> None:
    """Runs an application, replacing one of that name, and waits until all its replicas run.

    Starts Serve if it does not run, without an ingress if the application has no route.

    Args:
        application: the application to run.
        name: name of the application.
        route_prefix: path of the application at Serve's ingress; None: none.
        until: deadline, on the monotonic clock.
        what: the application, for messages; empty: its name.

    Raises:
        StartupError: the replicas did not start, or not in time; the message has the reason that Serve gives.
    """
    what = what or f"application {name!r}"
    try:
        if ray_private.serve_controller() is None:
            serve.start(proxy_location="Disabled" if route_prefix is None else "HeadOnly")
        target = serve.RunTarget(application, name=name, route_prefix=route_prefix)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        while (why := _why_not_running(name, what)) is not None:
            if time.monotonic() > until:
                raise StartupError(f"{what} did not start in time: {why}", name=name)
            time.sleep(_POLL_S)
        if route_prefix is not None:
            wait_for_route(what, until)
    except (RuntimeError, TimeoutError, RayError, RayServeException) as error:
        raise StartupError(f"{what} did not start: {first_line(error)}", name=name) from error


def wait_for_route(what: str, until: float) -> None:
    """Waits until every proxy of Serve's ingress knows the running applications; Serve has no public call for that.

    Args:
        what: the application, for the message.
        until: deadline, on the monotonic clock.

    Raises:
        StartupError: not in time.
    """
    calls = ray_private.calls_to_proxies(ray_private.serve_controller(), max(until - time.monotonic(), 0.001))
    if not calls:
        return
    _, late = ray.wait(calls, num_returns=len(calls), timeout=max(until - time.monotonic(), 0.001))
    if late:
        raise StartupError(f"{len(late)} of {len(calls)} doors did not know the path of {what} in time")


def delete_application(name: str, timeout_s: float) -> bool:
    """Deletes an application, so that its replicas hand over their data and end.

    Returns:
        False if that took longer than ``timeout_s``, or if Serve's controller failed, which is logged. True if Serve
        does not run.
    """
    deadline = time.monotonic() + timeout_s
    controller = ray_private.serve_controller()
    if controller is None:
        return True
    try:
        ray_private.start_to_delete(controller, name)
        while ray_private.serve_has(controller, name, max(deadline - time.monotonic(), 0.001)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
    except RayError as error:
        _log.warning("whether Serve has ended %r is not known: %s", name, first_line(error))
        return False


def _why_not_running(name: str, what: str) -> str | None:
    """Serve's reason why an application does not run yet, in one line; None: it runs.

    Raises:
        StartupError: it failed.
    """
    try:
        application = serve.status().applications.get(name)
    except RayActorError as error:  # Serve's controller is being restarted
        return first_line(error)
    if application is None:
        return "Serve does not know it"
    if application.status == ApplicationStatus.RUNNING:
        return None
    messages = [deployment.message.strip() for deployment in application.deployments.values() if deployment.message]
    lines = [message.splitlines() for message in (*messages, application.message.strip()) if message]
    if application.status in _FAILED:  # a message is a traceback then, whose last line is the error
        why = "; ".join(message[-1] for message in lines[: len(messages) or 1])
        raise StartupError(f"{what} did not start ({application.status.value}): {why}", name=name)
    return lines[0][0] if lines else application.status.value
