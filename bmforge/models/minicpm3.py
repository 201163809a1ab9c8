"""MiniCPM3 (Hu et al., "MiniCPM", arXiv 2404.06395): MiniCPM with latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.latent import LATENT_NAMES, Latent, LatentConfig
from bmforge.models.llama import llama_heads
from bmforge.models.llama_like import llama_names_with
from bmforge.models.minicpm import MiniCPM, same_longrope

__all__ = ["MiniCPM3", "MiniCPM3Config"]

_FACTORS = """
    1.0591234137867171 1.1241891283591912 1.2596935748670968 1.5380380402321725 2.093982484148734
    3.1446935121267696 4.937952647693647 7.524541999994549 10.475458000005451 13.062047352306353
    14.85530648787323 15.906017515851266 16.461961959767827 16.740306425132903 16.87581087164081
    16.940876586213285
"""


@dataclass(kw_only=True)
class MiniCPM3Config(LatentConfig):
    """Config of MiniCPM3; other fields are those of `LatentConfig`.

    Args:
        embed_scale: factor on the embedding.
        depth_scale: factor on each sublayer's output, divided by sqrt(num_layers).
        base_hidden_size: hidden size of the muP base model; the input of the language-model
            head is divided by hidden_size / base_hidden_size.
        attn_bias: use biases on the projections to the latents and on the output projection.
    """

    family: ClassVar[str] = "minicpm3"
    heads: ClassVar[dict[str, Head]] = llama_heads("MiniCPM3", classifiers=("sequence",))
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        **LATENT_NAMES,
        embed_scale="scale_emb",
        depth_scale="scale_depth",
        base_hidden_size="dim_model_base",
        attn_bias="attention_bias",
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {"mlp_bias": (False, None)}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "minicpm3-4b": {"rope_scaling": same_longrope(_FACTORS)}
    }
    hub_ids: ClassVar[dict[str, str]] = {"minicpm3-4b": "openbmb/MiniCPM3-4B"}

    vocab_size: int = 73448
    hidden_size: int = 2560
    intermediate_size: int = 6400
    num_layers: int = 62
    num_heads: int = 40
    max_seq_len: int = 32768
    norm_eps: float = 1e-5
    init_std: float = 0.1
    tie_word_embeddings: bool = True
    kv_rank: int = 256
    q_rank: int = 768
    plain_dim: int = 64
    rope_dim: int = 32
    value_dim: int = 64
    embed_scale: float = 12.0
    depth_scale: float = 1.4
    base_hidden_size: int = 256
    attn_bias: bool = False

    @property
    def interleaves(self) -> bool:
        """False: dim i is rotated with dim i + rope_dim / 2."""
        return False

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        sizes = {"hidden_size": cls.hidden_size, "num_attention_heads": cls.num_heads}
        width, heads = (raw.get(name) or size for name, size in sizes.items())
        if raw.get("v_head_dim") is None:
            raw["v_head_dim"] = width // heads
        # transformers treats null as "no scaling".
        if "scale_depth" in raw and raw["scale_depth"] is None:
            raw["scale_depth"] = math.sqrt(raw.get("num_hidden_layers", cls.num_layers))
        if "dim_model_base" in raw and raw["dim_model_base"] is None:
            raw["dim_model_base"] = width
        return super()._read_special(raw)


class MiniCPM3(MiniCPM, Latent):
    """MiniCPM3: latent attention, with MiniCPM's scaled embeddings, residuals and logits."""

    config_class = MiniCPM3Config
