"""MiniCPM-1B, MiniCPM-2B and MiniCPM4: Llama with muP scales.

Source: Hu et al., "MiniCPM" (arXiv 2404.06395); MiniCPM team, "MiniCPM4" (arXiv 2506.07900). The
published checkpoints contain remote code, which is never run. MiniCPM4's sparse attention
(`sparse_config`) is not implemented; without it, attention is dense, as in the published configs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_names_with, preset_size
from bmforge.nn import BlockSpec

__all__ = ["MiniCPM", "MiniCPMConfig", "same_longrope"]

_FACTORS_HALF_B = """
    1.0004360675811768 1.0668443441390991 1.1631425619125366 1.3025742769241333 1.5040205717086792
    1.7941505908966064 2.2101221084594727 2.802666664123535 3.6389970779418945 4.804192543029785
    6.39855432510376 8.527148246765137 11.277542114257812 14.684998512268066 18.69317054748535
    23.13019371032715 27.72362518310547 32.1606559753418 36.168827056884766 39.57627868652344
    42.32667541503906 44.45526885986328 46.04962921142578 47.21482849121094 48.05115509033203
    48.64370346069336 49.05967712402344 49.34980392456055 49.551246643066406 49.69068145751953
    49.78697967529297 49.85338592529297
"""
_FACTORS_8B = """
    0.9977997200264581 1.014658295992452 1.0349680404997148 1.059429246056193 1.0888815016813513
    1.1243301355211495 1.166977103606075 1.2182568066927284 1.2798772354275727 1.3538666751582975
    1.4426259039919596 1.5489853358570191 1.6762658237220625 1.8283407612492941 2.0096956085876183
    2.225478927469756 2.481536379650452 2.784415934557119 3.1413289096347365 3.560047844772632
    4.048719380066383 4.615569542115128 5.2684819496549835 6.014438591970396 6.858830049237097
    7.804668263503327 8.851768731513417 9.99600492938444 11.228766118181639 12.536757560834843
    13.902257701387796 15.303885189125953 16.717837610115794 18.119465097853947 19.484965238406907
    20.792956681060105 22.02571786985731 23.16995406772833 24.217054535738416 25.16289275000465
    26.007284207271347 26.753240849586767 27.40615325712662 27.973003419175363 28.461674954469114
    28.880393889607006 29.237306864684626 29.540186419591297 29.79624387177199 30.01202719065413
    30.193382037992453 30.34545697551969 30.47273746338473 30.579096895249787 30.66785612408345
    30.741845563814174 30.80346599254902 30.85474569563567 30.897392663720595 30.932841297560394
    30.962293553185553 30.986754758742034 31.007064503249293 31.02392307921529
"""


def same_longrope(factors: str) -> dict[str, Any]:
    """Return a longrope scaling with the same factors for short and long inputs."""
    numbers = [float(number) for number in factors.split()]
    return {
        "kind": "longrope",
        "short_factor": numbers,
        "long_factor": list(numbers),
        "original_seq_len": 32768,
    }


def _minicpm_heads() -> dict[str, Head]:
    lm_names = {"lm_head.weight": "lm_head.weight"}
    aliases = ("MiniCPMLongRopeForCausalLM",)
    return {
        "language_model": Head("MiniCPMForCausalLM", lm_names, aliases=aliases),
        **classifier_heads("MiniCPM", "score", "", "", sequence_bias=False),
        "none": Head("MiniCPMModel", prefix=""),
    }


@dataclass(kw_only=True)
class MiniCPMConfig(LlamaLikeConfig):
    """Config of MiniCPM; other fields are those of `LlamaLikeConfig`.

    Args:
        embed_scale: factor on the embedding.
        depth_scale: factor on each sublayer's output, divided by sqrt(num_layers).
        base_hidden_size: hidden size of the muP base model; the input of the language-model
            head is divided by hidden_size / base_hidden_size.
        attn_bias: use biases on q, k, v and o.
    """

    family: ClassVar[str] = "minicpm"
    heads: ClassVar[dict[str, Head]] = _minicpm_heads()
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        embed_scale="scale_emb",
        depth_scale="scale_depth",
        base_hidden_size="dim_model_base",
        attn_bias="attention_bias",
    )
    # Used only by draft models for speculative decoding.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"mup_denominator"})
    # Defaults of the published code.
    hf_defaults: ClassVar[dict[str, Any]] = {
        "norm_eps": 1e-6,
        "embed_scale": 1.0,
        "depth_scale": 1.0,
        "base_hidden_size": 1,
        "init_std": 0.02,
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "minicpm-1b": {**preset_size(1536, 3840, 52, 24, 8), "vocab_size": 73440},
        "minicpm-2b": {},
        "minicpm4-0.5b": {
            **preset_size(1024, 4096, 24, 16, 2),
            "vocab_size": 73448,
            "max_seq_len": 32768,
            "rope_scaling": same_longrope(_FACTORS_HALF_B),
        },
        "minicpm4-8b": {
            **preset_size(4096, 16384, 32, 32, 2),
            "vocab_size": 73448,
            "max_seq_len": 32768,
            "norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_scaling": same_longrope(_FACTORS_8B),
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "minicpm-1b": "openbmb/MiniCPM-1B-sft-bf16",
        "minicpm-2b": "openbmb/MiniCPM-2B-sft-bf16",
        "minicpm4-0.5b": "openbmb/MiniCPM4-0.5B",
        "minicpm4-8b": "openbmb/MiniCPM4-8B",
    }

    vocab_size: int = 122753
    hidden_size: int = 2304
    intermediate_size: int = 5760
    num_layers: int = 40
    num_heads: int = 36
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    init_std: float = 0.1
    tie_word_embeddings: bool = True
    embed_scale: float = 12.0
    depth_scale: float = 1.4
    base_hidden_size: int = 256
    attn_bias: bool = False

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.base_hidden_size < 1:
            yield f"base_hidden_size={self.base_hidden_size} must be a positive number"

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for MiniCPM; its first checkpoints have a class name but no model_type."""
        class_names = {n for head in cls.heads.values() for n in (head.architecture, *head.aliases)}
        has_class = bool(class_names & set(raw.get("architectures") or ()))
        return raw.get("model_type") == cls.family or ("model_type" not in raw and has_class)

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        scaling = raw.get("rope_scaling")
        if isinstance(scaling, dict) and scaling.get("type") == "su":  # former name of longrope
            raw["rope_scaling"] = {**scaling, "type": "longrope"}
        return super()._read_special(raw)


class MiniCPM(LlamaLike):
    """MiniCPM: Llama's blocks with scaled embeddings, residuals and logits."""

    config_class: ClassVar[type[LlamaLikeConfig]] = MiniCPMConfig

    @classmethod
    def make_block(cls, config: Any) -> BlockSpec:
        """Return the block spec with MiniCPM's factor on the sublayers' outputs."""
        scale = config.depth_scale / math.sqrt(config.num_layers)
        return replace(super().make_block(config), residual_scale=scale)

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, with the factors on embeddings and logits."""
        return replace(
            super().make_spec(config),
            embed_scale=config.embed_scale,
            head_scale=config.base_hidden_size / config.hidden_size,
        )
