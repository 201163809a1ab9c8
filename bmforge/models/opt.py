"""OPT (Zhang et al., "OPT: Open Pre-trained Transformer Language Models", 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = ["OPT", "OPTConfig"]

# Epsilon of the norms: fixed in the published code, without a field in config.json.
_NORM_EPS = 1e-5
# Index of the first position's row: the original code reserves two rows for padding.
_POSITION_OFFSET = 2


def _size(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}


@dataclass(kw_only=True)
class OPTConfig(ModelConfig):
    """Config of OPT; other fields are those of `ModelConfig`.

    Args:
        embed_size: width of the embedding, which is projected if it is not hidden_size; 0 means
            hidden_size.
        norm_first: True for pre-norm blocks; False for post-norm blocks (350m).
        remove_final_norm: omit the norm after the last block, as before transformers 4.20.1;
            post-norm models never have it.
        activation: activation of the MLP, such as gelu, gelu_new, relu or silu.
        bias: use biases in all projections of the blocks.
        norm_affine: use weights and biases in the norms.
        pad_token_id: id of padding tokens, whose embedding gets no gradient; None for no padding.
        dropout: dropout probability of the outputs of attention and MLP.
        attn_dropout: dropout probability of attention weights.
        layer_drop: probability of skipping a block in training.
    """

    family: ClassVar[str] = "opt"
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("OPTForCausalLM", {"lm_head.weight": "lm_head.weight"}),
        **classifier_heads("OPT", "score", "", "qa_outputs", sequence_bias=False),
        "none": Head("OPTModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "norm_first": "do_layer_norm_before",
        "remove_final_norm": "_remove_final_layer_norm",
        "activation": "activation_function",
        "bias": "enable_bias",
        "norm_affine": "layer_norm_elementwise_affine",
        "pad_token_id": "pad_token_id",
        "dropout": "dropout",
        "attn_dropout": "attention_dropout",
        "layer_drop": "layerdrop",
        "init_std": "init_std",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    # The published code does not use this field.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"activation_dropout"})
    hf_defaults: ClassVar[dict[str, Any]] = {"dropout": 0.1}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "opt-125m": _size(768, 12, 12),
        "opt-350m": {**_size(1024, 24, 16), "embed_size": 512, "norm_first": False},
        "opt-1.3b": _size(2048, 24, 32),
        "opt-2.7b": _size(2560, 32, 32),
        "opt-6.7b": _size(4096, 32, 32),
        "opt-13b": _size(5120, 40, 40),
        "opt-30b": _size(7168, 48, 56),
        "opt-66b": _size(9216, 64, 72),
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"facebook/{name}" for name in presets}

    vocab_size: int = 50272
    hidden_size: int = 768
    intermediate_size: int = 0
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 2048
    norm_eps: float = _NORM_EPS
    embed_size: int = 0
    norm_first: bool = True
    remove_final_norm: bool = False
    activation: str = "relu"
    bias: bool = True
    norm_affine: bool = True
    pad_token_id: int | None = 1
    dropout: float = 0.0
    attn_dropout: float = 0.0
    layer_drop: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.norm_eps != _NORM_EPS:
            yield f"norm_eps={self.norm_eps} must be {_NORM_EPS}, as in all OPT models"
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            yield f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}"

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        size = raw.pop("word_embed_proj_dim", None)
        values: dict[str, Any] = {"embed_size": 0 if size == raw.get("hidden_size") else size or 0}
        if "pad_token_id" in raw:
            values["pad_token_id"] = raw.pop("pad_token_id")  # null means no padding token
        return values, raw

    def _write_special(self) -> dict[str, Any]:
        return {"word_embed_proj_dim": self.embed_size or self.hidden_size}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, with `init_std` instead of `initializer_range`."""
        return {n: v for n, v in super().to_hf().items() if n != "initializer_range"}


class OPT(CausalLM):
    """OPT: learned positions that skip padding; the 350m model has post-norm blocks."""

    config_class = OPTConfig
    family_traits = Traits("causal", "next token", "learned")
    hf_prefix = "model."

    def __init__(self, config: OPTConfig) -> None:
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.bias,
            out_bias=config.bias,
            dropout=config.attn_dropout,
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            MLPSpec(config.intermediate_size, config.activation, bias=config.bias),
            norm=NormSpec("layer", config.norm_eps, affine=config.norm_affine),
            norm_place="pre" if config.norm_first else "post",
            residual_dropout=config.dropout,
            layer_drop=config.layer_drop,
        )
        spec = DecoderSpec(
            block,
            position_offset=_POSITION_OFFSET,
            positions_from_mask=True,
            embed_size=0 if config.embed_size == config.hidden_size else config.embed_size,
            padding_id=config.pad_token_id,
            final_norm=config.norm_first and not config.remove_final_norm,
        )
        super().__init__(config, spec)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        block, stack = "layers.{i}.", "model.decoder."
        published = f"{stack}layers.{{i}}."
        parts = {
            f"{block}attn.{p}": f"{published}self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj")
        }
        names = {p: f"{stack}{p}.weight" for p in ("embed_positions", "project_in", "project_out")}
        return [
            WeightRule("embed.weight", f"{stack}embed_tokens.weight"),
            *(WeightRule(f"{own}.weight", name) for own, name in names.items()),
            *linear_rules(
                {
                    "norm": f"{stack}final_layer_norm",
                    f"{block}attn_norm": f"{published}self_attn_layer_norm",
                    f"{block}mlp_norm": f"{published}final_layer_norm",
                    **parts,
                    f"{block}attn.o_proj": f"{published}self_attn.out_proj",
                    f"{block}mlp.up_proj": f"{published}fc1",
                    f"{block}mlp.down_proj": f"{published}fc2",
                }
            ),
        ]
