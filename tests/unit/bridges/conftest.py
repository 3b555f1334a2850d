"""The doors of a test of an engine's bridge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.bridges.contract_service import ContractService, serving_contracts


@pytest.fixture
def service() -> Iterator[ContractService]:
    with serving_contracts() as made:
        yield made
