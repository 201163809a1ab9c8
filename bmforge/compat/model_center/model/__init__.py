"""The old model classes, each over the zoo's model of that family.

Start reading at `base.py` (opening, building, heads), then `config.py` (old field names); the
classes are in `encoders`, `decoders` and `seq2seqs`, what they return in `outputs`.
"""

from __future__ import annotations

from bmforge.compat.model_center.model.base import BaseModel
from bmforge.compat.model_center.model.config import Config
from bmforge.compat.model_center.model.decoders import (
    CPM1,
    CPM3,
    GLM,
    GPT2,
    OPT,
    CPM1Config,
    CPM3Config,
    GLMConfig,
    GPT2Config,
    GPTj,
    GPTjConfig,
    Llama,
    LlamaConfig,
    MiniCPM,
    MiniCPMConfig,
    Mixtral,
    MixtralConfig,
    OPTConfig,
    Qwen,
    QwenConfig,
)
from bmforge.compat.model_center.model.encoders import (
    Bert,
    BertConfig,
    Longformer,
    LongformerConfig,
    Roberta,
    RobertaConfig,
    ViT,
    ViTConfig,
)
from bmforge.compat.model_center.model.outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    Seq2SeqModelOutput,
)
from bmforge.compat.model_center.model.seq2seqs import (
    CPM2,
    EVA,
    T5,
    CPM2Config,
    EVAConfig,
    T5Config,
)

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
]
