"""ModelCenter's layers, for programs that build their own models.

Start at `basic.py`, then `attention.py`, `blocks.py` and `transformer.py`; `positions.py` has
position embeddings. The classes in `model` do not use these layers.
"""
