"""Modules of jobs whose model has one weight for each value."""


def scale_model(outputs: str, size: int = 1) -> str:
    """A module with ``build_model``, whose forward gives ``outputs``.

    Args:
        outputs: an expression of ``obs`` and ``self.factor``.
        size: number of values in each of these.
    """
    return f"""
import numpy as np, torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros({size}))

    def forward(self, obs):
        return {outputs}

def build_model(name, config):
    return Scale(), (np.zeros((1, {size}), np.float32),)
"""


MODEL = scale_model("obs * self.factor")
AGENT = """
import numpy as np
from brayx import Agent, forward, record

class VersionAgent(Agent):
    async def on_tick(self, state):
        outputs, version = await forward("model", np.ones(1, np.float32))
        state.output = [float(outputs[0]), version]
        self.version = version

    async def on_session_end(self, reason):
        record("episode_return", 10.0 * self.version)
"""
"""Answers with the weight and its version, and records ten times that as its return."""
