"""Games that speak another wire, each a gamecore: Gymnasium's and PettingZoo's environments."""
