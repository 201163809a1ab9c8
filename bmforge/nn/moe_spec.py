"""Hyperparameters of MoE layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bmforge.errors import ConfigError
from bmforge.nn.router import RouterKind, Scoring

__all__ = ["MoESpec"]


@dataclass(frozen=True)
class MoESpec:
    """Hyperparameters of an MoE layer.

    Args:
        num_experts: number E of experts.
        experts_per_token: number k of experts per token.
        intermediate_size: hidden width F of one expert.
        activation: activation function: "relu", "gelu", "gelu_tanh", "silu" or "tanh".
        gated: experts have a `gate_proj`.
        normalize_weights: normalize the k weights of a token to sum to 1; otherwise use the
            softmax over all experts unchanged.
        shared_size: hidden width F of a shared expert that processes every token; 0 means no
            shared expert.
        shared_gate: multiply the shared expert's output by a sigmoid gate of the token.
        choice: "top_k": the k largest router logits, weighted by their softmax; "balanced": one
            unweighted expert (the router gets no gradient), assigned evenly over the tokens in
            training and by argmax otherwise; "per_call": the same k experts for all tokens of a
            call, with the largest sum of sigmoids.
        capacity_factor: maximum number of tokens per expert in training, as a multiple of an even
            share of the rank's tokens (see `limit_loads`); None means no limit.
        in_scale: factor on the input of the router and the experts; see `AttentionSpec`.
        out_scale: factor on the input of the experts' last projections.
        weighs: weight the selected experts' outputs; otherwise sum them unweighted, and the
            router gets no gradient.
        bias: biases on each expert's gate and up projections, and on its down projection or,
            without `weighs`, a single bias on the summed output.
        swiglu_limit: bound of the clamped SwiGLU of gpt-oss (`mlp.clamp_swiglu`), which replaces
            the gated activation; None means no limit.
        router: "linear", "two_layer", or "wide", which is linear in fp32 (see `router.py`).
        scoring: function from router logits to the experts' weights, "softmax" or "sigmoid".
        router_bias: a "linear" router has a bias.
        choice_bias: a "wide" router has an untrained bias that is added to the scores only for the
            choice of experts.
        expert_groups: number of groups of experts; a token's experts are in `top_groups` of them
            (see `router.pick_experts`).
        top_groups: number of groups from which a token's experts are chosen.
        weight_scale: factor on the weights of a token's experts.
        split: shared expert and experts are slices of one dense MLP, which checkpoints contain.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    normalize_weights: bool = True
    shared_size: int = 0
    shared_gate: bool = True
    choice: Literal["top_k", "balanced", "per_call"] = "top_k"
    capacity_factor: float | None = None
    in_scale: float = 1.0
    out_scale: float = 1.0
    weighs: bool = True
    bias: bool = False
    swiglu_limit: float | None = None
    router: RouterKind = "linear"
    router_bias: bool = False
    scoring: Scoring = "softmax"
    choice_bias: bool = False
    expert_groups: int = 1
    top_groups: int = 1
    weight_scale: float = 1.0
    split: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for inconsistent values."""
        if self.choice == "per_call" and (self.weighs or self.capacity_factor is not None):
            raise ConfigError(
                "choice='per_call' selects the same experts for all tokens and adds their "
                "outputs, so weighs=True and capacity_factor are not supported. Set "
                "weighs=False, and leave capacity_factor out."
            )
        if self.split and self.weighs:
            raise ConfigError(
                "split=True does not support weighs=True, because it adds the outputs of the "
                "experts without weights. Set weighs=False."
            )
        self._check_groups()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is out of range (allowed: 1 to "
                f"num_experts={self.num_experts})."
            )
        if self.swiglu_limit is not None and not (self.gated and self.swiglu_limit > 0):
            raise ConfigError(
                f"swiglu_limit={self.swiglu_limit} must be positive and needs gated=True. "
                "Use None for no limit."
            )
        if self.choice == "balanced" and self.experts_per_token != 1:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be 1 with choice='balanced'."
            )
        if self.capacity_factor is None:
            return
        if not (self.capacity_factor > 0 and math.isfinite(self.capacity_factor)):
            raise ConfigError(
                f"capacity_factor={self.capacity_factor} must be above 0, or None for no limit."
            )
        if self.choice == "balanced":
            raise ConfigError(
                f"capacity_factor={self.capacity_factor} has no effect with choice='balanced', "
                "where all experts get the same number of tokens. Leave capacity_factor out."
            )

    def _check_groups(self) -> None:
        """Raise `ConfigError` if `top_groups` groups have fewer experts than a token needs."""
        groups, top = self.expert_groups, self.top_groups
        if groups < 1 or self.num_experts % groups:
            raise ConfigError(
                f"expert_groups={groups} must divide num_experts={self.num_experts}. Set "
                "expert_groups=1 and top_groups=1 to choose among all experts."
            )
        if not 1 <= top <= groups or self.experts_per_token > top * (self.num_experts // groups):
            raise ConfigError(
                f"top_groups={top} of expert_groups={groups} must contain at least "
                f"experts_per_token={self.experts_per_token} experts. Raise top_groups, at most to "
                "expert_groups."
            )
