"""Alias at BMTrain's import path `block_layer`; the code is in `block.py`."""

from bmforge.compat.bmtrain.block import Block, TransformerBlockList
from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.names import missing_names

__all__ = ["Block", "CheckpointBlock", "TransformerBlockList"]

CheckpointBlock = Block

__getattr__ = missing_names("bmtrain", NAMES, __all__, "block_layer")
