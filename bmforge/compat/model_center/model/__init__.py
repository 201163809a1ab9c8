"""ModelCenter's model classes, each of which wraps bmforge's model of the same family.

Start at `base.py` (loading, building, heads), then `config` (field names). The classes are in
`encoders`, `decoders`, `openbmb` and `seq2seqs`, their results in `outputs`.
"""

from __future__ import annotations

from bmforge.compat.model_center.model.base import BaseModel
from bmforge.compat.model_center.model.config import (
    BertConfig,
    Config,
    CPM1Config,
    CPM2Config,
    CPM3Config,
    EVAConfig,
    GLMConfig,
    GPT2Config,
    GPTjConfig,
    LlamaConfig,
    LongformerConfig,
    MiniCPMConfig,
    MixtralConfig,
    OPTConfig,
    QwenConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    VitConfig,
)
from bmforge.compat.model_center.model.decoders import (
    GPT2,
    OPT,
    GPTj,
    Llama,
    MiniCPM,
    Mixtral,
    Qwen,
)
from bmforge.compat.model_center.model.encoders import Bert, Longformer, Roberta, ViT
from bmforge.compat.model_center.model.openbmb import CPM1, CPM3, GLM
from bmforge.compat.model_center.model.outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ModelOutput,
    Seq2SeqModelOutput,
)
from bmforge.compat.model_center.model.seq2seqs import CPM2, EVA, T5

__all__ = [
    "BaseModel",
    "BaseModelOutput",
    "BaseModelOutputWithPooling",
    "Bert",
    "BertConfig",
    "CPM1",
    "CPM1Config",
    "CPM2",
    "CPM2Config",
    "CPM3",
    "CPM3Config",
    "Config",
    "EVA",
    "EVAConfig",
    "GLM",
    "GLMConfig",
    "GPT2",
    "GPT2Config",
    "GPTj",
    "GPTjConfig",
    "Llama",
    "LlamaConfig",
    "Longformer",
    "LongformerConfig",
    "MiniCPM",
    "MiniCPMConfig",
    "ModelOutput",
    "Mixtral",
    "MixtralConfig",
    "OPT",
    "OPTConfig",
    "Qwen",
    "QwenConfig",
    "Roberta",
    "RobertaConfig",
    "Seq2SeqModelOutput",
    "T5",
    "T5Config",
    "ViT",
    "ViTConfig",
    "VitConfig",
]
