"""Table of all families; a family is an import line and two names here.

The exports of `bmforge.models`, the checkpoints that `AutoModel` opens, the presets, and the rows
of docs/reference/capabilities.md and docs/reference/presets.md follow from it.
"""

from __future__ import annotations

from bmforge.models.base import Model
from bmforge.models.bert import Bert, BertConfig
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.models.cpm2 import CPM2, CPM2Config
from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.models.eva import EVA, EVAConfig
from bmforge.models.glm import GLM, GLMConfig
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.gptj import GPTJ, GPTJConfig
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.models.longformer import Longformer, LongformerConfig
from bmforge.models.minicpm import MiniCPM, MiniCPMConfig
from bmforge.models.mixtral import Mixtral, MixtralConfig
from bmforge.models.opt import OPT, OPTConfig
from bmforge.models.qwen import Qwen, QwenConfig
from bmforge.models.qwen_moe import Qwen2Moe, Qwen2MoeConfig, Qwen3Moe, Qwen3MoeConfig
from bmforge.models.roberta import Roberta, RobertaConfig
from bmforge.models.t5 import T5, T5Config
from bmforge.models.vit import ViT, ViTConfig

__all__ = [
    "Bert",
    "BertConfig",
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
    "Llama",
    "LlamaConfig",
    "Longformer",
    "LongformerConfig",
    "MiniCPM",
    "MiniCPMConfig",
    "Mixtral",
    "MixtralConfig",
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
]

FAMILIES: dict[str, type[Model]] = {
    name: globals()[name] for name in __all__ if issubclass(globals()[name], Model)
}
