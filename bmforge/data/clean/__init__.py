"""Making texts comparable, dropping copies, splitting documents; see `normalise.py`."""
