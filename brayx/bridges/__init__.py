"""Gamecores that play environments of other libraries: `gym` those of Gymnasium, `pettingzoo` those of PettingZoo.

Know nothing of agents, and load neither Ray nor torch.
"""
