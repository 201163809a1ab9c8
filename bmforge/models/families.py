"""Table of all model families; each family is one import line and two names.

The exports of `bmforge.models`, the checkpoints that `AutoModel` opens, the presets, and the rows
of docs/reference/capabilities.md and docs/reference/presets.md are derived from this table.
"""

from __future__ import annotations

from bmforge.models.base import Model
from bmforge.models.bert import Bert, BertConfig
from bmforge.models.cohere import Cohere, CohereConfig
from bmforge.models.cohere2 import Cohere2, Cohere2Config
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.models.cpm2 import CPM2, CPM2Config
from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.models.eva import EVA, EVAConfig
from bmforge.models.gemma import Gemma, Gemma2, Gemma2Config, Gemma3, Gemma3Config, GemmaConfig
from bmforge.models.glm import GLM, GLMConfig
from bmforge.models.glm4 import GLM4, GLM4Config
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.models.gptj import GPTJ, GPTJConfig
from bmforge.models.granite import Granite, GraniteConfig
from bmforge.models.internlm3 import InternLM3, InternLM3Config
from bmforge.models.llama import Llama, LlamaConfig
from bmforge.models.longformer import Longformer, LongformerConfig
from bmforge.models.minicpm import MiniCPM, MiniCPMConfig
from bmforge.models.mistral import Mistral, MistralConfig
from bmforge.models.mixtral import Mixtral, MixtralConfig
from bmforge.models.olmo2 import OLMo2, OLMo2Config, OLMo3, OLMo3Config
from bmforge.models.opt import OPT, OPTConfig
from bmforge.models.phi import Phi, PhiConfig
from bmforge.models.phi3 import Phi3, Phi3Config
from bmforge.models.qwen import Qwen, QwenConfig
from bmforge.models.qwen_moe import Qwen2Moe, Qwen2MoeConfig, Qwen3Moe, Qwen3MoeConfig
from bmforge.models.roberta import Roberta, RobertaConfig
from bmforge.models.seed_oss import SeedOss, SeedOssConfig
from bmforge.models.smollm3 import SmolLM3, SmolLM3Config
from bmforge.models.stablelm import StableLM, StableLMConfig
from bmforge.models.starcoder2 import Starcoder2, Starcoder2Config
from bmforge.models.t5 import T5, T5Config
from bmforge.models.vit import ViT, ViTConfig
from bmforge.models.xlm_roberta import XLMRoberta, XLMRobertaConfig

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
    "Cohere",
    "Cohere2",
    "Cohere2Config",
    "CohereConfig",
    "EVA",
    "EVAConfig",
    "GLM",
    "GLM4",
    "GLM4Config",
    "GLMConfig",
    "GPT2",
    "GPT2Config",
    "GPTJ",
    "GPTJConfig",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "Gemma3",
    "Gemma3Config",
    "GemmaConfig",
    "Granite",
    "GraniteConfig",
    "InternLM3",
    "InternLM3Config",
    "Llama",
    "LlamaConfig",
    "Longformer",
    "LongformerConfig",
    "MiniCPM",
    "MiniCPMConfig",
    "Mistral",
    "MistralConfig",
    "Mixtral",
    "MixtralConfig",
    "OLMo2",
    "OLMo2Config",
    "OLMo3",
    "OLMo3Config",
    "OPT",
    "OPTConfig",
    "Phi",
    "Phi3",
    "Phi3Config",
    "PhiConfig",
    "Qwen",
    "Qwen2Moe",
    "Qwen2MoeConfig",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "QwenConfig",
    "Roberta",
    "RobertaConfig",
    "SeedOss",
    "SeedOssConfig",
    "SmolLM3",
    "SmolLM3Config",
    "StableLM",
    "StableLMConfig",
    "Starcoder2",
    "Starcoder2Config",
    "T5",
    "T5Config",
    "ViT",
    "ViTConfig",
    "XLMRoberta",
    "XLMRobertaConfig",
]

FAMILIES: dict[str, type[Model]] = {
    name: globals()[name] for name in __all__ if issubclass(globals()[name], Model)
}
