"""ModelCenter's layers, for programs that build their own models.

Start at `basic.py`, then `attention.py` and `blocks.py`; `positions.py` has position embeddings.
The classes in `model` do not use these layers.
"""
