"""Model families, one file each; models are saved in Hugging Face's format.

Start reading at `gpt2.py` (a family is a config, a composition of `nn` modules and a map of weight
names), then `base.py` (building, loading, saving) and `hub.py` (finding a model by name).
"""

from bmforge.models import families
from bmforge.models.base import Model
from bmforge.models.changes import Change, freeze_base_
from bmforge.models.config import ModelConfig
from bmforge.models.families import *  # noqa: F403
from bmforge.models.hub import AutoModel
from bmforge.models.init import init_weights_, weight_drawer
from bmforge.models.load import load_weights_, weight_reader
from bmforge.models.output import ModelOutput
from bmforge.models.rules import LayoutRules

__all__ = [
    "AutoModel",
    "Change",
    "LayoutRules",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "freeze_base_",
    "init_weights_",
    "load_weights_",
    "weight_drawer",
    "weight_reader",
]
__all__ += families.__all__
