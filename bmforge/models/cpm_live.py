"""Shared code of CPM-Ant and CPM-Bee: config names, blocks with muP scales, weight names.

Linear weights have standard deviation 1, and their inputs are divided by the square root of the
width, as are embeddings and the head's input. There are no biases, and the head is tied to the
embedding.
Compressed models lack attention or MLP in some layers (`mask_modules`).

Source: OpenBMB/CPM-Live; Yang et al., "Tensor Programs V" (2022) for the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.heads import check_logits_at, pick_states
from bmforge.models.output import ModelOutput
from bmforge.models.sizes import LayerSizes
from bmforge.models.stack import find_differing_layers, run_layers, span_of, width_into
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.segment import BucketBias

__all__ = ["CPMLive", "CPMLiveConfig", "read_masks"]

# transformers' field names -> CPM-Live's.
HF_FIELDS = {
    "hidden_size": "dim_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
}
_EMBED_STD = 0.02


def read_masks(text: str) -> tuple[tuple[bool, bool], ...]:
    """Parse `mask_modules` from text with one letter per layer.

    Args:
        text: one letter per layer: "." has both sublayers, "a" lacks attention, "f" lacks the MLP,
            "x" lacks both.
    """
    return tuple((letter in "ax", letter in "fx") for letter in "".join(text.split()))


@dataclass(kw_only=True)
class CPMLiveConfig(ModelConfig):
    """Config fields of CPM-Ant and CPM-Bee; other fields are those of `ModelConfig`.

    Args:
        max_seq_len: distance beyond which all token pairs share one bucket; longer texts are
            possible.
        num_buckets: number of distance buckets.
        dropout: dropout probability of attention weights, in the MLP, and of each sublayer's
            output.
        sum_scale: factor on the residual stream after each sublayer.
        mask_modules: one pair per layer: True if it has no attention, True if it has no MLP; empty
            if all layers are complete.
        init_std: standard deviation of the initialization of linear weights and position biases.
        pad_token_id: id of padding tokens, used if there is no mask.
    """

    # Fields without effect on results.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        {"half", "max_new_tokens", "repetition_penalty", "_from_model_config"}
    )
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "dim_model",
        "intermediate_size": "dim_ff",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "head_dim": "dim_head",
        "max_seq_len": "position_bias_max_distance",
        "num_buckets": "position_bias_num_buckets",
        "norm_eps": "eps",
        "dropout": "dropout_p",
        "sum_scale": "sum_scale",
        "mask_modules": "mask_modules",
        "init_std": "init_std",
        "pad_token_id": "pad_token_id",
    }
    # Defaults of CPM-Live's config classes.
    hf_defaults: ClassVar[dict[str, Any]] = {"num_heads": 64, "head_dim": 64, "num_layers": 32}

    vocab_size: int = 30720
    hidden_size: int = 4096
    intermediate_size: int = 10240
    num_layers: int = 48
    num_heads: int = 32
    num_kv_heads: int = 0
    head_dim: int = 128
    max_seq_len: int = 2048
    norm_eps: float = 1e-6
    init_std: float = 1.0
    num_buckets: int = 512
    dropout: float = 0.0
    sum_scale: float = 1.0
    mask_modules: tuple[tuple[bool, bool], ...] = ()
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        """Normalize `mask_modules`, which config.json gives as a list or null."""
        pairs = self.mask_modules or ()
        if any(len(pair) != 2 for pair in pairs):
            raise ConfigError(
                f"{type(self).__name__}: mask_modules={self.mask_modules!r} must have one pair "
                "(attention removed, MLP removed) per layer."
            )
        self.mask_modules = tuple((bool(attn), bool(mlp)) for attn, mlp in pairs)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if len(self.mask_modules) not in (0, self.num_layers):
            yield (
                f"mask_modules has {len(self.mask_modules)} entries (expected: one for each of "
                f"num_layers={self.num_layers} layers)"
            )
        if self.mask_modules and all(attn for attn, _ in self.mask_modules):
            yield "mask_modules removes the attention of all layers"

    @property
    def scales_weights(self) -> bool:
        """True if the muP scales are applied separately from the weights."""
        return True

    @property
    def is_gated(self) -> bool:
        """Always True: the MLP has a gate."""
        return True

    def own_sizes(self) -> dict[str, list[LayerSizes]]:
        """Return the layer sizes, without the sublayers that compressed models lack."""
        full_sizes = self.layer_sizes()
        masks = self.mask_modules or ((False, False),) * self.num_layers
        return {"layers": [full_sizes.without(no_attn, no_mlp) for no_attn, no_mlp in masks]}

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        for published, live in HF_FIELDS.items():
            if published in raw:
                raw[live] = raw.pop(published)
        return {}, raw

    def to_hf(self) -> dict[str, Any]:
        """Return the config with CPM-Live's names."""
        unnamed = {*HF_FIELDS, *({"initializer_range"} - set(self.raw))}
        out = {name: value for name, value in super().to_hf().items() if name not in unnamed}
        out["mask_modules"] = [list(pair) for pair in self.mask_modules] or None
        return out


class CPMLive(CausalLM):
    """Decoder with blocks that may lack a sublayer, and a head tied to the embedding.

    Args:
        config: config of the family.
        num_rows: number of rows of the attention bias table.
        extra_tokens: number of rows of embedding and head beyond the vocabulary.
    """

    shifts_labels = False

    def __init__(self, config: CPMLiveConfig, num_rows: int, extra_tokens: int = 0) -> None:
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        widths = width, inner, config.intermediate_size
        in_scale, out_scale, down = (self._shrink(config, n) for n in widths)
        attn = AttentionSpec(
            config.num_heads,
            config.num_heads,
            config.head_dim,
            qkv_bias=False,
            out_bias=False,
            dropout=config.dropout,
            causal=False,
            in_scale=in_scale,
            out_scale=out_scale,
        )
        mlp = MLPSpec(config.intermediate_size, "gelu", True, False, config.dropout, in_scale, down)
        block = BlockSpec(
            width,
            attn,
            mlp,
            norm=NormSpec("rms", config.norm_eps),
            residual_dropout=config.dropout,
            sum_scale=config.sum_scale,
        )
        lacking = (
            replace(block, attn=None if no_attn else attn, mlp=None if no_mlp else mlp)
            for no_attn, no_mlp in config.mask_modules
        )
        spec = DecoderSpec(
            block,
            find_differing_layers(block, lacking),
            learned_positions=False,
            extra_tokens=extra_tokens,
            embed_scale=in_scale,
            head_scale=in_scale,
        )
        super().__init__(config, spec)
        self.rel_bias = BucketBias(config.num_heads, num_rows)

    @staticmethod
    def _shrink(config: CPMLiveConfig, width: int) -> float:
        return 1 / math.sqrt(width) if config.scales_weights else 1.0

    @property
    def is_begun(self) -> bool:
        """True on later pipeline stages: an earlier stage has embedded the tokens."""
        return span_of(self.layers).first > 0

    @property
    def is_done(self) -> bool:
        """True if this pipeline stage runs the last block."""
        span = span_of(self.layers)
        return span.last == span.total

    def width_into(self, name: str) -> int:
        """Return w if the input of the parameter's layer is divided by sqrt(w); 1 if it is not."""
        if name.endswith("norm.weight") or name.startswith("rel_bias"):
            return 1
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            return width_into(self, name)
        return int(self.config.hidden_size)

    def init_std(self, name: str) -> float:
        """Return the standard deviation of a parameter's initialization.

        Embeddings have a standard deviation of 0.02. If the weights include the muP scales
        (`folded`), it is divided by the square root of the input width.
        """
        inside = name.startswith(("layers.", "rel_bias"))
        std = self.config.init_std if inside else _EMBED_STD
        return std if self.config.scales_weights else std / math.sqrt(self.width_into(name))

    def _run(
        self,
        x: Tensor,
        mask: Tensor | None,
        bias: Tensor,
        cache: KeyValueCache | None,
        keep_states: bool,
        skipped: int = 0,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run blocks and final norm; drop the first `skipped` tokens of the output."""
        x, states = run_layers(self.layers, x, {None: mask}, keep_states, bias=bias, cache=cache)
        if not self.is_done:
            return x, None
        assert self.norm is not None
        x = self.norm(x)
        hidden_states = (*states[:-1], x) if keep_states else None
        if not skipped:
            return x, hidden_states
        return x[:, skipped:], hidden_states and tuple(
            state[:, skipped:] for state in hidden_states
        )

    def _answer(
        self,
        x: Tensor,
        hidden_states: tuple[Tensor, ...] | None,
        labels: Tensor | None,
        num_items: float | Tensor | None,
        logits_to_keep: int | None,
        extension: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> ModelOutput:
        """Apply the head: return the loss if there are (unshifted) labels, otherwise logits.

        Args:
            x: last hidden states.
            hidden_states: hidden states of all layers, or None.
            labels: target ids.
            num_items: divisor of the summed loss.
            logits_to_keep: number of last positions whose logits are returned; None for all.
            extension: additional rows of the head, (E, D), which use unscaled hidden states.
            logits_at: positions, per sequence, whose logits are returned; None for all.
        """
        check_logits_at(self.config.head, labels, logits_at)
        if not self.is_done:
            return ModelOutput(stage_outputs=(x,))
        if self.config.head == "none":
            return ModelOutput(last_hidden_state=x, hidden_states=hidden_states)
        if extension is not None:
            extension = extension / self.spec.head_scale
        if labels is None:
            states = pick_states(x, logits_to_keep, logits_at)
            logits = self.lm_head(self._scale_for_head(states), more_rows=extension)
            return ModelOutput(None, logits, x, hidden_states)
        loss = self.lm_head(self._scale_for_head(x), labels, num_items, more_rows=extension)
        return ModelOutput(loss, None, x, hidden_states)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to CPM-Live's names."""
        block, published = "layers.{i}.", "encoder.layers.{i}."
        attn, mlp = f"{published}self_att.", f"{published}ffn."
        names = {
            "embed": "input_embedding",
            "norm": "encoder.output_layernorm",
            f"{block}attn_norm": f"{attn}layernorm_before_attention",
            f"{block}attn.q_proj": f"{attn}self_attention.project_q",
            f"{block}attn.k_proj": f"{attn}self_attention.project_k",
            f"{block}attn.v_proj": f"{attn}self_attention.project_v",
            f"{block}attn.o_proj": f"{attn}self_attention.attention_out",
            f"{block}mlp_norm": f"{mlp}layernorm_before_ffn",
            f"{block}mlp.gate_proj": f"{mlp}ffn.w_in.w_0",
            f"{block}mlp.up_proj": f"{mlp}ffn.w_in.w_1",
            f"{block}mlp.down_proj": f"{mlp}ffn.w_out",
        }
        bias = WeightRule("rel_bias.weight", "position_bias.relative_attention_bias")
        return [*linear_rules(names, ("weight",)), bias]
