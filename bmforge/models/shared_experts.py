"""Base classes of decoders with routed and shared experts, as introduced by DeepSeek.

The first layers have an MLP; the others have routed experts and a shared MLP for all tokens.
Source: Dai et al., "DeepSeekMoE" (arXiv 2401.06066); DeepSeek-AI, "DeepSeek-V3" (arXiv 2412.19437).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_names_with
from bmforge.models.mixtral import expert_rules
from bmforge.models.sizes import LayerSizes, feed_sizes
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import MLPSpec, MoESpec
from bmforge.nn.router import Scoring

__all__ = ["SHARED_EXPERT_NAMES", "SharedExperts", "SharedExpertsConfig"]

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")

# Config fields of these families -> transformers' names.
SHARED_EXPERT_NAMES = llama_names_with(
    num_experts="n_routed_experts",
    experts_per_token="num_experts_per_tok",
    expert_size="moe_intermediate_size",
    num_shared="n_shared_experts",
    num_dense="first_k_dense_replace",
    expert_groups="n_group",
    top_groups="topk_group",
    normalize_weights="norm_topk_prob",
    weight_scale="routed_scaling_factor",
    attn_bias="attention_bias",
)


@dataclass(kw_only=True)
class SharedExpertsConfig(LlamaLikeConfig):
    """Config of a decoder with routed and shared experts; the rest is from `LlamaLikeConfig`.

    Args:
        intermediate_size: intermediate size F of the MLP in layers without experts.
        num_experts: number E of routed experts in a layer.
        experts_per_token: number k of routed experts per token.
        expert_size: hidden width F of one expert.
        num_shared: number of shared experts, which form one MLP.
        num_dense: number of leading layers without experts.
        expert_groups: number of groups of experts.
        top_groups: number of groups from which the experts of a token are chosen.
        normalize_weights: normalize the weights of a token's experts to sum to 1.
        weight_scale: factor on the weights of a token's experts.
        attn_bias: use biases in attention.
    """

    hf_names: ClassVar[dict[str, str]] = SHARED_EXPERT_NAMES
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "output_router_logits": (False, None),
        "moe_layer_freq": (1, None),
    }
    # Fields of the pretraining loss, and of multi-token prediction modules, which are not loaded.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        ["aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"]
    )
    scoring: ClassVar[Scoring] = "sigmoid"

    num_experts: int = 128
    experts_per_token: int = 8
    expert_size: int = 1408
    num_shared: int = 1
    num_dense: int = 1
    expert_groups: int = 1
    top_groups: int = 1
    normalize_weights: bool = True
    weight_scale: float = 1.0
    attn_bias: bool = False

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if not 0 <= self.num_dense <= self.num_layers:
            yield f"num_dense={self.num_dense} must be from 0 to num_layers={self.num_layers}"

    def check(self) -> None:
        """Raise `ConfigError` for inconsistent fields."""
        super().check()
        self.expert_spec()

    def expert_spec(self) -> MoESpec:
        """Return the spec of the experts in a layer."""
        return MoESpec(
            self.num_experts,
            self.experts_per_token,
            self.expert_size,
            self.activation,
            normalize_weights=self.normalize_weights,
            shared_size=self.num_shared * self.expert_size,
            shared_gate=False,
            router="wide",
            scoring=self.scoring,
            choice_bias=self.scoring == "sigmoid",
            expert_groups=self.expert_groups,
            top_groups=self.top_groups,
            weight_scale=self.weight_scale,
        )

    def layer_mlps(self) -> tuple[MLPSpec | MoESpec, ...]:
        """Return the spec of every layer's MLP or experts."""
        dense = MLPSpec(self.intermediate_size, self.activation, gated=True, bias=False)
        return tuple(
            dense if layer < self.num_dense else self.expert_spec()
            for layer in range(self.num_layers)
        )

    def own_sizes(self) -> dict[str, list[LayerSizes]]:
        """Return the layer sizes, including the sizes of each layer's experts or MLP."""
        sizes = self.layer_sizes()
        return {"layers": [replace(sizes, **feed_sizes(mlp)) for mlp in self.layer_mlps()]}

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        raw.setdefault("n_routed_experts", raw.pop("num_local_experts", None))
        return super()._read_special(raw)

    def _write_special(self) -> dict[str, Any]:
        # Multi-token prediction modules are neither loaded nor written.
        return {**super()._write_special(), "num_nextn_predict_layers": 0}


class SharedExperts(LlamaLike):
    """Decoder with routed and shared experts in all layers after the leading dense ones."""

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, including the experts of its layers."""
        spec = super().make_spec(config)
        blocks = [replace(spec.block, mlp=mlp) for mlp in config.layer_mlps()]
        others = {layer: block for layer, block in enumerate(blocks) if block != blocks[-1]}
        return replace(spec, block=blocks[-1], blocks=others)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        own, published = "layers.{i}.mlp.", "model.layers.{i}.mlp"
        shared = {
            f"{own}shared_expert.{part}": f"{published}.shared_experts.{part}"
            for part in _PROJECTIONS
        }
        bias = WeightRule(f"{own}router.choice_bias", f"{published}.gate.e_score_correction_bias")
        experts = expert_rules(published, dict(zip(_PROJECTIONS, _PROJECTIONS, strict=True)))
        return [*super().weight_rules(), *experts, bias, *linear_rules(shared, ("weight",))]

    def is_unused(self, name: str) -> bool:
        """Return True for tensors of multi-token prediction modules, after the last layer."""
        match = _LAYER.match(name)
        is_behind = match is not None and int(match[1]) >= self.config.num_layers
        return is_behind or super().is_unused(name)
