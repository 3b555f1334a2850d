"""Our Adam is torch's, number for number, and does not bring the compiler along."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from brayx.algorithms.adam import Adam


def trained(kinds, fused):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = kinds[0](module.parameters(), lr=1e-2, eps=1e-5, fused=fused)
    for index in range(20):
        if index == 10:  # the state of one is the other's
            state = optimizer.state_dict()
            optimizer = kinds[1](module.parameters(), lr=0.5, eps=1e-5, fused=fused)
            optimizer.load_state_dict(state)
        optimizer.zero_grad(set_to_none=True)
        module(torch.randn(16, 4)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kinds", [(Adam, Adam), (Adam, torch.optim.Adam), (torch.optim.Adam, Adam)])
def test_it_equals_torchs(kinds, fused):
    assert torch.equal(trained(kinds, fused), trained((torch.optim.Adam,) * 2, fused))


def test_it_does_not_import_the_compiler():
    code = """
import sys, torch
from brayx.algorithms.adam import Adam
module = torch.nn.Linear(2, 2)
optimizer = Adam(module.parameters(), fused=True)
optimizer.zero_grad(set_to_none=True)
module(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
