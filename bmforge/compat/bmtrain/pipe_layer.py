"""Alias at BMTrain's import path `pipe_layer`; the code is in `pipeline.py`."""

from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.bmtrain.pipeline import PipelineTransformerBlockList
from bmforge.compat.names import missing_names

__all__ = ["PipelineTransformerBlockList"]

__getattr__ = missing_names("bmtrain", NAMES, __all__, "pipe_layer")
