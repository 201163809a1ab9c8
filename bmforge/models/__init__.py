"""Model families, one file each; models are saved in Hugging Face's format.

Start reading at `gpt2.py` (a family is a config, a composition of `nn` modules and a map of weight
names), then `base.py` (building, loading, saving) and `hub.py` (finding a model by name).
"""

# ruff: noqa: F401
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bmforge.models.base import Model
from bmforge.models.changes import Change, freeze_base_
from bmforge.models.config import ModelConfig
from bmforge.models.families import FAMILIES, MODULES
from bmforge.models.hub import AutoModel
from bmforge.models.init import init_weights_, weight_initializer
from bmforge.models.load import load_weights_, weight_reader
from bmforge.models.output import ModelOutput
from bmforge.models.rules import LayoutRules

if TYPE_CHECKING:  # the exports that `__getattr__` imports
    from bmforge.models.bert import Bert, BertConfig
    from bmforge.models.bloom import Bloom, BloomConfig
    from bmforge.models.cohere import Cohere, CohereConfig
    from bmforge.models.cohere2 import Cohere2, Cohere2Config
    from bmforge.models.cpm1 import CPM1, CPM1Config
    from bmforge.models.cpm2 import CPM2, CPM2Config
    from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig
    from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
    from bmforge.models.deepseek import (
        DeepSeekV2,
        DeepSeekV2Config,
        DeepSeekV3,
        DeepSeekV3Config,
    )
    from bmforge.models.eva import EVA, EVAConfig
    from bmforge.models.falcon import Falcon, FalconConfig
    from bmforge.models.gemma import Gemma, Gemma2, Gemma2Config, Gemma3, Gemma3Config, GemmaConfig
    from bmforge.models.glm import GLM, GLMConfig
    from bmforge.models.glm4 import GLM4, GLM4Config
    from bmforge.models.glm4_moe import GLM4Moe, GLM4MoeConfig
    from bmforge.models.gpt2 import GPT2, GPT2Config
    from bmforge.models.gpt_neox import GPTNeoX, GPTNeoXConfig
    from bmforge.models.gpt_oss import GptOss, GptOssConfig
    from bmforge.models.gptj import GPTJ, GPTJConfig
    from bmforge.models.granite import Granite, GraniteConfig
    from bmforge.models.internlm3 import InternLM3, InternLM3Config
    from bmforge.models.llama import Llama, LlamaConfig
    from bmforge.models.longformer import Longformer, LongformerConfig
    from bmforge.models.minicpm import MiniCPM, MiniCPMConfig
    from bmforge.models.minicpm3 import MiniCPM3, MiniCPM3Config
    from bmforge.models.mistral import Mistral, MistralConfig
    from bmforge.models.mixtral import Mixtral, MixtralConfig
    from bmforge.models.modernbert import ModernBert, ModernBertConfig
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
    "AutoModel",
    "Change",
    "LayoutRules",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "freeze_base_",
    "init_weights_",
    "load_weights_",
    "weight_initializer",
    "weight_reader",
]
__all__ += [name for names in MODULES.values() for n in names for name in (n, f"{n}Config")]


def __getattr__(name: str) -> Any:
    """Import a family's model class or config class when it is first used."""
    family = name.removesuffix("Config")
    if family not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return FAMILIES[name] if family == name else FAMILIES[family].config_class
