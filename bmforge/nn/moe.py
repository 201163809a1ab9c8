"""Mixture of experts: a feed-forward layer in which a router selects some experts per token.

Tokens are sorted by expert, each expert processes its rows in one product, and the results are
scattered back. Without a capacity limit no token is dropped.

Source: Shazeer et al., "Outrageously large neural networks" (2017); Jiang et al., "Mixtral of
experts" (2024); shared expert with its own gate: Qwen team, "Qwen1.5-MoE" (2024); balanced
assignment: Lewis et al., "BASE layers" (2021), as in CPM-2; capacity: Lepikhin et al., "GShard"
(2020); experts as slices of an MLP: Zhang et al., "MoEfication" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.device import wide_dtype
from bmforge.errors import ConfigError
from bmforge.nn.balanced_assignment import assign_balanced
from bmforge.nn.grouped import grouped_linear, take_rows
from bmforge.nn.mlp import MLP, MLPSpec, apply_gate, get_activation
from bmforge.nn.part import beside_parts
from bmforge.nn.recompute import call_and_drop
from bmforge.nn.router import RouterKind, Scoring, build_router, pick_experts
from bmforge.nn.shard_hooks import Pass, pass_on
from bmforge.nn.uniform_routing import can_run_uniform, run_uniform

__all__ = [
    "Dispatch",
    "Experts",
    "MoE",
    "MoESpec",
    "dispatch_locally",
    "limit_loads",
]

# (tokens (M, D), their experts (M, k), number of experts, function of the experts) -> (M, k, D)
RunExperts = Callable[[Tensor, Tensor], Tensor]
Dispatch = Callable[[Tensor, Tensor, int, RunExperts], Tensor]


@dataclass(frozen=True)
class MoESpec:
    """Hyperparameters of a mixture of experts.

    Args:
        num_experts: number E of experts.
        experts_per_token: number k of experts per token.
        intermediate_size: hidden width F of one expert.
        activation: activation function: relu, gelu, gelu_tanh, silu or tanh.
        gated: experts have a `gate_proj`.
        normalize_weights: normalize the k weights of a token to sum to 1; otherwise use the
            softmax over all experts as is.
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
        bias: biases on each expert's gate and up projections, and one on the summed output.
        router: "linear", "two_layer" or "wide": linear in fp32 (`router.py`).
        scoring: function from router logits to the experts' weights, "softmax" or "sigmoid".
        choice_bias: a "wide" router has a bias on the choice of experts that is not trained.
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
    router: RouterKind = "linear"
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
                "outputs. Set weighs=False and leave capacity_factor out."
            )
        if self.split and self.weighs:
            raise ConfigError("split=True uses no router weights. Set weighs=False.")
        self._check_groups()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is out of range (1 to "
                f"num_experts={self.num_experts})."
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
                "where all experts get the same number of tokens. Leave it out."
            )

    def _check_groups(self) -> None:
        """Raise `ConfigError` if the groups of experts cannot hold a token's experts."""
        groups, top = self.expert_groups, self.top_groups
        if groups < 1 or self.num_experts % groups:
            raise ConfigError(
                f"expert_groups={groups} must divide num_experts={self.num_experts}. Set "
                "expert_groups=1 and top_groups=1 to choose among all experts."
            )
        if not 1 <= top <= groups or self.experts_per_token > top * (self.num_experts // groups):
            raise ConfigError(
                f"top_groups={top} of expert_groups={groups} must contain "
                f"experts_per_token={self.experts_per_token} experts."
            )


def dispatch_locally(x: Tensor, index: Tensor, num_experts: int, run: RunExperts) -> Tensor:
    """Send tokens to experts on this rank, and return the experts' outputs in token order.

    Args:
        x: hidden states of the tokens.
        index: experts of each token; the value E means no expert.
        num_experts: number E of experts.
        run: function that runs the experts on sorted rows, given the end of each expert's rows.

    Shape:
        x: (M, D); index: (M, k); run: (M * k, D), (E,) -> (M * k, D); returns (M, k, D)
    """
    count = index.shape[1]
    experts, order = index.flatten().sort(stable=True)
    ends = torch.searchsorted(
        experts, torch.arange(num_experts, device=x.device, dtype=experts.dtype), right=True
    )
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    out = run(take_rows(x, order // count, places), ends)
    return take_rows(out, places, order).unflatten(0, index.shape)


def limit_loads(index: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Limit the tokens per expert: return `index` with E (no expert) for excess tokens.

    First choices take precedence over second ones, and earlier tokens over later ones.

    Shape:
        index: (M, k) -> (M, k)

    Source: Lepikhin et al., "GShard" (2020), algorithm 1, without its random second choice.
    """
    experts, order = index.t().flatten().sort(stable=True)
    numbers = torch.arange(len(order), device=index.device)
    each = torch.arange(num_experts, device=index.device, dtype=experts.dtype)
    starts = torch.searchsorted(experts, each)
    limited = experts.where(numbers - starts[experts] < capacity, num_experts)
    return torch.empty_like(limited).scatter_(0, order, limited).view(index.shape[::-1]).t()


def _run_limited(run: RunExperts, x: Tensor, ends: Tensor) -> Tensor:
    """Run the experts; rows without an expert, which are sorted last, become zero."""
    count = int(ends[-1])
    return F.pad(run(x[:count], ends), (0, 0, 0, x.shape[0] - count))


def _add_biases(x: Tensor, biases: Tensor | None, ends: Tensor) -> Tensor:
    """Add each row's expert bias, from (E, F), to rows sorted by expert."""
    if biases is None:
        return x
    numbers = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    return x + biases.index_select(0, torch.searchsorted(ends, numbers, right=True))


class Experts(nn.Module):
    """E feed-forward experts with stacked weights, each applied to its own rows.

    Args:
        hidden_size: width D of the hidden states.
        spec: hyperparameters.

    Shape:
        x: (S, D), sorted by expert; ends: (E,) -> (S, D)
    """

    # Adapters take part in each of its products, where one forward hook could not add them.
    asks_parts = True

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        self.activation = get_activation(spec.activation)
        self.active_share = spec.experts_per_token / spec.num_experts
        inner = (spec.num_experts, spec.intermediate_size, hidden_size)
        outer = (spec.num_experts, hidden_size, spec.intermediate_size)
        self.gate_proj = nn.Parameter(torch.empty(inner)) if spec.gated else None
        self.up_proj = nn.Parameter(torch.empty(inner))
        self.down_proj = nn.Parameter(torch.empty(outer))
        for parameter in self.parameters():
            bound = 1 / math.sqrt(parameter.shape[-1])
            nn.init.uniform_(parameter, -bound, bound)
        wide = (spec.num_experts, spec.intermediate_size) if spec.bias else None
        self.up_bias = nn.Parameter(torch.zeros(wide)) if wide else None
        self.gate_bias = nn.Parameter(torch.zeros(wide)) if wide and spec.gated else None

    def keep_biases_of_(self, plain: Experts) -> None:
        """Share the biases of the plain experts that this quantized layer replaces."""
        self.register_parameter("up_bias", plain.up_bias)
        self.register_parameter("gate_bias", plain.gate_bias)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows."""
        up = _add_biases(self.product("up_proj", x, ends), self.up_bias, ends)
        gate = self.product("gate_proj", x, ends) if self.has_gate() else None
        gate = gate if gate is None else _add_biases(gate, self.gate_bias, ends)

        def inner() -> Tensor:
            if gate is None:
                return self.activation(up)
            return apply_gate(self.activation, gate, up)

        return call_and_drop(lambda h: self.product("down_proj", h, ends), inner(), inner)

    def product(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each expert's rows by its matrix `key`, including attached adapters.

        Shape:
            x: (S, in) -> (S, out)
        """
        out = self.multiply(key, x, ends)
        for _, part in beside_parts(self):
            out = out + part(key, x, ends)
        return out

    def stack_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return (E, out, in) of every stacked weight by name."""
        stacks = {key: getattr(self, key) for key in ("gate_proj", "up_proj", "down_proj")}
        return {key: tuple(s.shape) for key, s in stacks.items() if s is not None}

    def has_gate(self) -> bool:
        """Return True if the experts have a `gate_proj`."""
        return self.gate_proj is not None

    def multiply(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each expert's rows by its matrix, without adapters; overridden if quantized."""
        return grouped_linear(x, getattr(self, key), ends)

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        experts, outer, inner = self.down_proj.shape
        return f"{experts} x ({outer}, {inner}), gated={self.gate_proj is not None}"


class MoE(nn.Module):
    """Mixture of experts: router, experts and an optional shared expert.

    Args:
        hidden_size: width D of the hidden states.
        spec: hyperparameters.

    Attributes:
        dispatch: function that sends tokens to experts and back; replaced by expert parallelism.
        assign: function for balanced assignment of tokens to experts; replaced by layouts.
        enter: function applied to the experts' input; replaced by layouts.
        leave: function applied to the experts' output; replaced by layouts.
        capacity_factor: see `MoESpec`; may be changed after construction.

    Shape:
        x: (..., D) -> (..., D) and the router logits (M, E) of M tokens
    """

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = spec.num_experts, spec.experts_per_token
        self.normalize_weights, self.choice = spec.normalize_weights, spec.choice
        self.capacity_factor = spec.capacity_factor
        self.dispatch: Dispatch = dispatch_locally
        self.assign: Pass = assign_balanced
        self.enter: Pass = pass_on
        self.leave: Pass = pass_on
        self.weighs, self.is_split = spec.weighs, spec.split
        self.scoring, self.weight_scale = spec.scoring, spec.weight_scale
        self.groups = spec.expert_groups, spec.top_groups
        self.router = build_router(spec.router, hidden_size, spec.num_experts, spec.choice_bias)
        self.experts = Experts(hidden_size, spec)
        self.down_bias = nn.Parameter(torch.zeros(hidden_size)) if spec.bias else None
        self.shared_expert = self.shared_gate = None
        if spec.shared_size:
            shared = MLPSpec(spec.shared_size, spec.activation, gated=spec.gated, bias=spec.bias)
            self.shared_expert = MLP(hidden_size, shared)
            self.shared_expert.down_proj.register_parameter("bias", None)
            if spec.shared_gate:
                self.shared_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the experts' outputs and the router logits."""
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        out = self.leave(self._mix(tokens, *self._route(logits)))
        if self.down_bias is not None:
            out = out + self.down_bias
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(tokens)) * shared
            out = out + shared
        return out.view_as(x), logits

    def _mix(self, tokens: Tensor, weights: Tensor | None, index: Tensor) -> Tensor:
        """Run the selected experts and combine their outputs per token."""
        run: RunExperts = self.experts
        alike = not self.weighs and (self.choice == "per_call" or index.shape[0] == 1)
        if alike and self.dispatch is dispatch_locally and can_run_uniform(run, Experts):
            return run_uniform(run, self.enter(tokens), index[0])
        if self.capacity_factor is not None and self.training:
            even = index.numel() / self.num_experts
            index = limit_loads(index, self.num_experts, math.ceil(self.capacity_factor * even))
            run = partial(_run_limited, run)
        parts = self.dispatch(self.enter(tokens), index, self.num_experts, run)
        if weights is not None:
            return (parts * self.enter(weights).to(parts.dtype).unsqueeze(-1)).sum(1)
        return parts.squeeze(1) if parts.shape[1] == 1 else parts.sum(1)

    def _route(self, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """Select k experts per token; return their weights, (M, k) or None, and indices, (M, k)."""
        if self.choice == "balanced":
            index = self.assign(logits) if self.training else logits.argmax(-1)
            return None, index.unsqueeze(-1)
        wide = logits.to(wide_dtype(logits.dtype))
        if self.choice == "per_call":
            best = torch.sigmoid(wide).sum(0).topk(self.experts_per_token).indices
            return None, best.expand(logits.shape[0], -1)
        if not self.weighs:
            return None, wide.topk(self.experts_per_token, dim=-1).indices
        bias = getattr(self.router, "choice_bias", None)
        weights, index = pick_experts(wide, self.experts_per_token, self.scoring, self.groups, bias)
        if self.normalize_weights:
            # Sigmoids can all be 0; the constant is DeepSeek's.
            least = 1e-20 if self.scoring == "sigmoid" else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + least)
        return (weights if self.weight_scale == 1.0 else weights * self.weight_scale), index
