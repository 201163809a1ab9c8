"""One zoo, one file per family; the native form on disk is the Hugging Face form.

Start reading at `gpt2.py` (a family is a config, an assembly of `nn` parts and a weight-name map),
then `base.py` (building, loading, saving) and `hub.py` (finding a model by name).
"""

from bmforge.models.base import Model
from bmforge.models.bert import Bert, BertConfig
from bmforge.models.changes import Change, freeze_base_
from bmforge.models.config import ModelConfig
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.models.cpm2 import CPM2, CPM2Config
from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.models.eva import EVA, EVAConfig
from bmforge.models.glm import GLM, GLMConfig
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.gptj import GPTJ, GPTJConfig
from bmforge.models.hub import AutoModel
from bmforge.models.init import init_weights_, weight_drawer
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.models.load import load_weights_, weight_reader
from bmforge.models.longformer import Longformer, LongformerConfig
from bmforge.models.minicpm import MiniCPM, MiniCPMConfig
from bmforge.models.mixtral import Mixtral, MixtralConfig
from bmforge.models.opt import OPT, OPTConfig
from bmforge.models.output import ModelOutput
from bmforge.models.qwen import Qwen, QwenConfig
from bmforge.models.qwen_moe import Qwen2Moe, Qwen2MoeConfig, Qwen3Moe, Qwen3MoeConfig
from bmforge.models.roberta import Roberta, RobertaConfig
from bmforge.models.rules import LayoutRules
from bmforge.models.t5 import T5, T5Config
from bmforge.models.vit import ViT, ViTConfig

__all__ = [
    "AutoModel",
    "Bert",
    "BertConfig",
    "Change",
    "CPM1",
    "CPM1Config",
    "CPM2",
    "CPM2Config",
    "CPMAnt",
    "CPMAntConfig",
    "CPMBee",
    "CPMBeeConfig",
    "EVA",
    "EVAConfig",
    "GLM",
    "GLMConfig",
    "GPT2",
    "GPT2Config",
    "GPTJ",
    "GPTJConfig",
    "LayoutRules",
    "Llama",
    "LlamaConfig",
    "Longformer",
    "LongformerConfig",
    "MiniCPM",
    "MiniCPMConfig",
    "Mixtral",
    "MixtralConfig",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "OPT",
    "OPTConfig",
    "Qwen",
    "Qwen2Moe",
    "Qwen2MoeConfig",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "QwenConfig",
    "Roberta",
    "RobertaConfig",
    "T5",
    "T5Config",
    "ViT",
    "ViTConfig",
    "freeze_base_",
    "init_weights_",
    "load_weights_",
    "weight_drawer",
    "weight_reader",
]
