"""Networks and the distributions over their outputs. Torch (and NumPy for acting) only."""
