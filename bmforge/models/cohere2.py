"""Command R7B and Command A (Cohere, "Command A", arXiv 2504.00698).

Blocks are Cohere's parallel blocks. Three of four layers have a sliding window and RoPE; the others
have full attention without position encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.cohere import Cohere
from bmforge.models.heads import Head
from bmforge.models.layer_types import LayerTypes, LayerTypesConfig
from bmforge.models.llama_like import llama_heads, llama_names_with, preset_size

__all__ = ["Cohere2", "Cohere2Config"]


@dataclass(kw_only=True)
class Cohere2Config(LayerTypesConfig):
    """Config of Command R7B; other fields are those of `LayerTypesConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        logit_scale: factor on the logits.
    """

    family: ClassVar[str] = "cohere2"
    full_every: ClassVar[int] = 4
    rotates_full: ClassVar[bool] = False
    heads: ClassVar[dict[str, Head]] = llama_heads("Cohere2", classifiers=())
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        norm_eps="layer_norm_eps", attn_bias="attention_bias", logit_scale="logit_scale"
    )
    # transformers' default, which no published checkpoint uses.
    hf_defaults: ClassVar[dict[str, Any]] = {"logit_scale": 0.0625}
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_qk_norm": (False, None),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (True, False),
        "use_gated_activation": (True,),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "order_of_interleaved_layers": ("local_attn_first", None),
        "cache_implementation": ("hybrid", None),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "command-r7b": {},
        "command-a-111b": preset_size(12288, 36864, 64, 96, 8),
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
        "command-a-111b": "CohereLabs/c4ai-command-a-03-2025",
    }

    vocab_size: int = 256000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    max_seq_len: int = 132096
    norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    tie_word_embeddings: bool = True
    attn_bias: bool = False
    logit_scale: float = 0.25


class Cohere2(Cohere, LayerTypes):
    """Command R7B or Command A with a language-model head."""

    config_class = Cohere2Config
