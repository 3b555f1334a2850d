"""Ray Train's ranks find their network. That failures are recorded: `tests/integration/test_trainer.py`."""

from __future__ import annotations

from brayx.cluster.ray_train import interface_of


def test_an_address_belongs_to_an_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") == ""
