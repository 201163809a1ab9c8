"""One zoo, one file per family; the native form on disk is the Hugging Face form.

Start reading at `gpt2.py` (a family is a config, an assembly of `nn` parts and a weight-name map),
then `base.py` (building, loading, saving) and `hub.py` (finding a model by name).
"""

from bmforge.models.base import Model
from bmforge.models.config import ModelConfig
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.hub import AutoModel
from bmforge.models.init import init_weights_
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.models.load import load_weights_
from bmforge.models.output import ModelOutput
from bmforge.models.rules import LayoutRules

__all__ = [
    "GPT2",
    "AutoModel",
    "GPT2Config",
    "LayoutRules",
    "Llama",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "init_weights_",
    "load_weights_",
]
