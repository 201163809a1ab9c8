"""EVA, for Chinese dialogue (Zhou et al. 2021; Gu et al., "EVA2.0", 2022).

A CPM-2 with role embeddings and, from 2.0 on, scaled attention. Names and fields are those of the
original class (branch huggingface of thu-coai/EVA); Megatron shards, which have CPM-2's names, can
be loaded too. The original class uses the exact GELU, but EVA was trained in Megatron with the tanh
approximation of GELU, so a model loaded from shards has `activation="gelu_new"`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.errors import ConfigError
from bmforge.models.cpm2 import megatron_rules
from bmforge.models.heads import Head
from bmforge.models.seq2seq import Seq2Seq
from bmforge.models.seq2seq_config import Seq2SeqConfig, make_spec
from bmforge.models.t5 import t5_rules
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule

__all__ = ["EVA", "EVAConfig"]

_NUM_ROLES = 2
_MEGATRON = "word_embeds.weight"  # a name that the published class does not have


def _size(hidden: int, inner: int, layers: int, heads: int, scaled: bool = True) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "attn_scale")
    return dict(zip(names, (hidden, inner, layers, heads, scaled), strict=True))


@dataclass(kw_only=True)
class EVAConfig(Seq2SeqConfig):
    """Config of EVA; other fields are those of `Seq2SeqConfig`.

    Args:
        attn_scale: divide the attention scores by sqrt(H), as in EVA 2.0.
        activation: activation of the MLP's gate.
        init_std: factor on T5's standard deviations.
    """

    family: ClassVar[str] = "eva"
    heads: ClassVar[dict[str, Head]] = {
        "sequence_to_sequence": Head("EVAModel", {"lm_head.weight": "lm_head.weight"}),
        "none": Head("EVATransformer"),
    }
    hf_names: ClassVar[dict[str, str]] = {
        **Seq2SeqConfig.hf_names,
        "attn_scale": "attn_scale",
        "activation": "dense_act_fn",
        "init_std": "initializer_factor",
        "decoder_start_token_id": "bos_token_id",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "eva1.0": _size(2048, 5120, 24, 32, scaled=False),
        "eva2.0-base": _size(768, 3072, 12, 12),
        "eva2.0-large": _size(1024, 4096, 24, 16),
        "eva2.0-xlarge": _size(2048, 5120, 24, 32),
    }
    hub_ids: ClassVar[dict[str, str]] = {
        f"eva2.0-{size}": f"thu-coai/EVA2.0-{size}" for size in ("base", "large", "xlarge")
    }

    vocab_size: int = 30000
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_layers: int = 24
    num_heads: int = 32
    init_std: float = 1.0
    attn_scale: bool = False
    activation: str = "gelu"
    decoder_start_token_id: int = 29810
    eos_token_id: int = 4

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        start = raw.get("decoder_start_token_id")
        if start is not None and start != raw.get("bos_token_id", start):
            raise ConfigError(
                f"EVAConfig: decoder_start_token_id={start} must equal "
                f"bos_token_id={raw['bos_token_id']}, the first token of EVA's targets. Correct "
                "config.json."
            )
        return values, {**raw, "bos_token_id": raw.get("bos_token_id", start)}


class EVA(Seq2Seq):
    """EVA with a sequence-to-sequence head."""

    config_class = EVAConfig
    family_traits = Traits(
        "encoder-decoder", "dialogues", "relative", sentinel="<s_{}>", tokenizer="EVATokenizer"
    )

    def __init__(self, config: EVAConfig) -> None:
        spec = make_spec(config, config.activation, None if config.attn_scale else 1.0)
        super().__init__(config, replace(spec, num_roles=_NUM_ROLES))

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the names of each stack's embedding copies to the shared ones."""
        copies = {
            "embed_tokens": "shared",
            "word_embeds": "word_embeds",
            "role_embeds": "role_embeds",
        }
        return {
            f"{stack}.{copy}.weight": f"{original}.weight"
            for stack in ("encoder", "decoder")
            for copy, original in copies.items()
        }

    @classmethod
    def complete_from_shapes(cls, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Set `activation` to "gelu_new" for Megatron shards, unless config.json contains it."""
        if _MEGATRON not in shapes or cls.config_class.hf_names["activation"] in config.raw:
            return config
        return config.replace(activation="gelu_new")

    def rules_for(self, names: Collection[str]) -> list[WeightRule]:
        """Map parameter names to the format of `names`: Megatron's or the published code's."""
        if _MEGATRON not in names:
            return super().rules_for(names)
        return self.expand(self.megatron_rules())

    def megatron_rules(self) -> list[WeightRule]:
        """Map parameter names, including the head's, to the names in Megatron shards."""
        roles = WeightRule("embed_segments.weight", "role_embeds.weight")
        head = WeightRule("lm_head.weight", "lm_head.weight")
        return [*megatron_rules(self.config), roles, head]

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to those of EVA's published code: T5's, and the role embeddings."""
        roles = WeightRule("embed_segments.weight", "role_embeds.weight")
        return [*t5_rules(is_gated=True), roles]
