"""The guide's actor without agents, as its page shows it, on Serve: played, refused, ended.

The application is this file's alone: the page's own options and builder are what is tested.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from ray import cloudpickle, serve

from brayx.cluster.directory import stop_directory
from brayx.cluster.replica import actor_deployment
from brayx.errors import BrayxError
from brayx.gamecore.client import Client
from tests.integration.conftest import Ingress
from tests.unit.test_docs import SNIPPETS

WAIT_S = 60.0


@pytest.fixture(scope="module")
def counter(ingress: Ingress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the guide's application, on free ports."""
    (shown,) = (snippet for snippet in SNIPPETS if snippet.is_("file") == "counter.py")
    folder = tmp_path_factory.mktemp("own")
    (folder / "counter.py").write_text(shown.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module("counter")
    cloudpickle.register_pickle_by_value(module)  # replicas of this cluster do not look in that folder
    options = module.options.model_copy(update={"native_port": 0, "tcp_port": 0})
    app = actor_deployment(module.build_runtime, options, name="counter", directory="counter/sessions")
    serve.run(app, name="counter", route_prefix="/")
    yield ingress.http
    serve.delete("counter")
    stop_directory("counter/sessions")
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["counter"]


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_it_keeps_its_sessions_apart(counter: str, scheme: str) -> None:
    url = counter.replace("http", scheme, 1)
    with Client(url, timeout_s=WAIT_S) as first, Client(url, timeout_s=WAIT_S) as other:
        assert (first.start(), other.start()) == (b"ready", b"ready")
        assert [first.tick(b"1.5"), other.tick(b"10"), first.tick(b"2")] == [b"1.5", b"10.0", b"3.5"]
        with pytest.raises(BrayxError, match="b'two' is not a number") as raised:
            first.tick(b"two")
        assert raised.value.code == "bad_body"
        assert first.tick(b"1") == b"4.5", "the session goes on"
        assert (first.stop(), other.stop()) == (b"4.5", b"10.0")


def test_a_stateless_call_is_refused(counter: str) -> None:
    with Client(counter, timeout_s=WAIT_S) as client, pytest.raises(BrayxError, match="Counter answers sessions only"):
        client.call(b"1")
