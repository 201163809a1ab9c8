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
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.device import accumulation_dtype
from bmforge.nn.balanced_assignment import assign_balanced
from bmforge.nn.grouped import grouped_linear, take_rows
from bmforge.nn.mlp import MLP, MLPSpec, apply_gate, clamp_swiglu, get_activation
from bmforge.nn.moe_spec import MoESpec
from bmforge.nn.part import adapters_of
from bmforge.nn.recompute import call_and_drop
from bmforge.nn.router import build_router, pick_experts
from bmforge.nn.shard_hooks import TensorFn, identity
from bmforge.nn.uniform_routing import can_run_uniform, run_uniform

__all__ = [
    "Dispatch",
    "Experts",
    "MoE",
    "MoESpec",
    "dispatch_locally",
    "limit_loads",
]

# (rows sorted by expert (S, D), end of each expert's rows (E,)) -> (S, D)
RunExperts = Callable[[Tensor, Tensor], Tensor]
# (tokens (M, D), indices of their experts (M, k), number of experts, RunExperts) -> (M, k, D)
Dispatch = Callable[[Tensor, Tensor, int, RunExperts], Tensor]


def dispatch_locally(x: Tensor, index: Tensor, num_experts: int, run: RunExperts) -> Tensor:
    """Send tokens to experts on this rank, and return the experts' outputs in token order.

    Args:
        x: hidden states of the tokens.
        index: indices of each token's experts; the index E means no expert.
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
    """Add the experts' biases, (E, F), to rows sorted by expert; `ends` are the groups' ends."""
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
    applies_adapters = True

    def __init__(self, hidden_size: int, spec: MoESpec) -> None:
        super().__init__()
        self.activation, self.swiglu_limit = get_activation(spec.activation), spec.swiglu_limit
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

    def keep_settings_of_(self, plain: Experts) -> None:
        """Copy the settings of the experts that this layer replaces, and share their biases."""
        self.activation, self.swiglu_limit = plain.activation, plain.swiglu_limit
        self.active_share = plain.active_share
        self.register_parameter("up_bias", plain.up_bias)
        self.register_parameter("gate_bias", plain.gate_bias)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows."""
        up = _add_biases(self.product("up_proj", x, ends), self.up_bias, ends)
        gate = self.product("gate_proj", x, ends) if self.has_gate() else None
        gate = gate if gate is None else _add_biases(gate, self.gate_bias, ends)

        def inner() -> Tensor:
            return self.activate(gate, up)

        return call_and_drop(lambda h: self.product("down_proj", h, ends), inner(), inner)

    def activate(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return the input of the down projections, given the gate and up projections' outputs."""
        if gate is None:
            return self.activation(up)
        if self.swiglu_limit is not None:
            return clamp_swiglu(gate, up, self.swiglu_limit)
        return apply_gate(self.activation, gate, up)

    def product(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each expert's rows by its matrix `key`, including attached adapters.

        Shape:
            x: (S, in) -> (S, out)
        """
        out = self.multiply(key, x, ends)
        for _, part in adapters_of(self):
            out = out + part(key, x, ends)
        return out

    def stack_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return a dict from the name of each stacked weight to its sizes (E, out, in)."""
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
        input_fn: function applied to the experts' input; replaced by layouts.
        output_fn: function applied to the experts' output; replaced by layouts.
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
        self.assign: TensorFn = assign_balanced
        self.input_fn: TensorFn = identity
        self.output_fn: TensorFn = identity
        self.weighs, self.is_split = spec.weighs, spec.split
        self.scoring, self.weight_scale = spec.scoring, spec.weight_scale
        self.groups = spec.expert_groups, spec.top_groups
        flags = spec.choice_bias, spec.router_bias
        self.router = build_router(spec.router, hidden_size, spec.num_experts, *flags)
        self.experts = Experts(hidden_size, spec)
        # The experts' output biases are added in this module, after the sum over ranks: inside
        # sharded experts, each rank would add them.
        sizes = (spec.num_experts, hidden_size) if spec.weighs else (hidden_size,)
        self.down_bias = nn.Parameter(torch.zeros(sizes)) if spec.bias else None
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
        weights, index = self._route(logits)
        index = self._limit(index)
        out = self.output_fn(self._mix(tokens, weights, index))
        if self.down_bias is not None:
            out = out + self._mean_bias(weights, index, out.dtype)
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
            return run_uniform(run, self.input_fn(tokens), index[0])
        if self.capacity_factor is not None and self.training:
            run = partial(_run_limited, run)
        parts = self.dispatch(self.input_fn(tokens), index, self.num_experts, run)
        if weights is not None:
            return (parts * self.input_fn(weights).to(parts.dtype).unsqueeze(-1)).sum(1)
        return parts.squeeze(1) if parts.shape[1] == 1 else parts.sum(1)

    def _limit(self, index: Tensor) -> Tensor:
        """Return the experts of each token, (M, k), with E for those beyond the capacity."""
        if self.capacity_factor is None or not self.training:
            return index
        even = index.numel() / self.num_experts
        return limit_loads(index, self.num_experts, math.ceil(self.capacity_factor * even))

    def _mean_bias(self, weights: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output bias: the same for all tokens, or a weighted sum of experts' biases.

        Shape:
            weights, index: (M, k); returns (D,) or (M, D)
        """
        assert self.down_bias is not None
        if weights is None:
            return self.down_bias
        shares = weights.new_zeros(len(weights), self.num_experts + 1).scatter(1, index, weights)
        return shares[:, :-1].to(dtype) @ self.down_bias

    def _route(self, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """Select k experts per token; return their weights, (M, k) or None, and indices, (M, k)."""
        if self.choice == "balanced":
            index = self.assign(logits) if self.training else logits.argmax(-1)
            return None, index.unsqueeze(-1)
        wide = logits.to(accumulation_dtype(logits.dtype))
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
