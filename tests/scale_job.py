"""Modules of a job whose model has one weight: its agent answers with that and its version, which is its return."""

MODEL = """
import numpy as np, torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return obs * self.factor

def build_model(name, config):
    return Scale(), (np.zeros((1, 1), np.float32),)
"""
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
