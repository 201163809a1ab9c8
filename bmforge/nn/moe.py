"""A feed-forward part made of experts, of which a router picks some for every token.

Tokens are sorted by expert, each expert works on its rows at once, and the results go back. Without
a capacity no token is dropped.

Source: Shazeer et al., "Outrageously large neural networks" (2017); Jiang et al., "Mixtral of
experts" (2024); the shared expert with its own gate: Qwen team, "Qwen1.5-MoE" (2024); balanced
choice: Lewis et al., "BASE layers" (2021), as CPM-2 has it; capacity: Lepikhin et al., "GShard"
(2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.device import wide_dtype
from bmforge.errors import ConfigError
from bmforge.nn.balanced import assign_balanced
from bmforge.nn.cuts import Pass, pass_on
from bmforge.nn.grouped import grouped_linear, take_rows
from bmforge.nn.mlp import MLP, MLPSpec, get_activation
from bmforge.nn.part import beside_parts
from bmforge.nn.remake import call_and_drop

__all__ = [
    "Dispatch",
    "Experts",
    "MoE",
    "MoESpec",
    "balance_loads",
    "count_loads",
    "dispatch_locally",
    "limit_loads",
    "load_balancing_loss",
]

# (tokens (M, D), their experts (M, k), number of experts, experts' work) -> (M, k, D)
RunExperts = Callable[[Tensor, Tensor], Tensor]
Dispatch = Callable[[Tensor, Tensor, int, RunExperts], Tensor]


@dataclass(frozen=True)
class MoESpec:
    """Everything in which layers of experts differ.

    Args:
        num_experts: E.
        experts_per_token: k, how many work on a token.
        intermediate_size: F of one expert.
        activation: a name in `nn.mlp.ACTIVATIONS`.
        gated: experts have a `gate_proj`.
        normalize_weights: the k weights of a token sum to 1; else they are what the softmax over
            all experts gave them.
        shared_size: F of an expert that works on every token; 0 for none.
        shared_gate: the shared expert's output is weighed by a sigmoid of the token.
        choice: "top_k": by the router's softmax, whose values weigh the experts; "balanced": one
            expert, not weighed (the router gets no gradient), which is in training such that all
            have equally many of all tokens, otherwise the one the router likes best.
        capacity_factor: in training an expert takes at most this times its even share of a
            process's tokens, see `limit_loads`; None takes all.
        in_scale: factor on what goes into router and experts, and
        out_scale: on what goes into their last projections; as in `AttentionSpec`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    normalize_weights: bool = True
    shared_size: int = 0
    shared_gate: bool = True
    choice: Literal["top_k", "balanced"] = "top_k"
    capacity_factor: float | None = None
    in_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the counts."""
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be from 1 to "
                f"num_experts={self.num_experts}."
            )
        if self.choice == "balanced" and self.experts_per_token != 1:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be 1 with choice='balanced'."
            )
        if self.capacity_factor is None:
            return
        if not (self.capacity_factor > 0 and math.isfinite(self.capacity_factor)):
            raise ConfigError(
                f"capacity_factor={self.capacity_factor} must be above 0, or None to drop no token."
            )
        if self.choice == "balanced":
            raise ConfigError(
                f"capacity_factor={self.capacity_factor} has no effect with choice='balanced', "
                "whose loads are even. Leave it out."
            )


def dispatch_locally(x: Tensor, index: Tensor, num_experts: int, run: RunExperts) -> Tensor:
    """Bring tokens to experts that are all here, and what they made back.

    Args:
        x: the tokens.
        index: which experts work on each; E stands for none, whose result is what `run` says.
        num_experts: E.
        run: the experts' work on rows sorted by expert; also given where each expert's rows end.

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
    """Let every expert take `capacity` tokens; return `index` with E, no expert, for the others.

    First choices come before second ones, and of those the tokens that stand first.

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
    """Run experts on the rows that one of them took; the rest, sorted last, are zeros."""
    kept = int(ends[-1])
    return F.pad(run(x[:kept], ends), (0, 0, 0, x.shape[0] - kept))


class Experts(nn.Module):
    """E feed-forward parts with stacked weights, each working on its own rows.

    Args:
        hidden_size: D.
        spec: the rest.

    Shape:
        x: (S, D), sorted by expert; ends: (E,) -> (S, D)
    """

    # Parts beside it go into each of its products, where one hook around all could not add them.
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

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply every expert to its rows."""
        up = self.product("up_proj", x, ends)
        gate = self.product("gate_proj", x, ends) if self.has_gate() else None

        def inner() -> Tensor:
            return self.activation(up) if gate is None else self.activation(gate) * up

        return call_and_drop(lambda h: self.product("down_proj", h, ends), inner(), inner)

    def product(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply the rows of every expert by its matrix of that name, parts beside it included.

        Shape:
            x: (S, in) -> (S, out)
        """
        out = self.multiply(key, x, ends)
        for _, part in beside_parts(self):
            out = out + part(key, x, ends)
        return out

    def stack_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return (E, out, in) of every stack, by its name."""
        stacks = {key: getattr(self, key) for key in ("gate_proj", "up_proj", "down_proj")}
        return {key: tuple(s.shape) for key, s in stacks.items() if s is not None}

    def has_gate(self) -> bool:
        """Tell whether there is a `gate_proj`."""
        return self.gate_proj is not None

    def multiply(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """The same of the matrices alone; a storage form puts its own here."""
        return grouped_linear(x, getattr(self, key), ends)

    def extra_repr(self) -> str:
        """Show the sizes."""
        experts, outer, inner = self.down_proj.shape
        return f"{experts} x ({outer}, {inner}), gated={self.gate_proj is not None}"


class MoE(nn.Module):
    """Router, experts and, where there is one, an expert for all tokens.

    Args:
        hidden_size: D.
        spec: the rest.

    Attributes:
        dispatch: brings tokens to experts and back, and
        assign: gives all experts equally many tokens, and
        enter: what goes to the experts goes through it first, and
        leave: what they made goes through it last; a layout puts its own here.
        capacity_factor: see `MoESpec`; may be set later.

    Shape:
        x: (..., D) -> (..., D), and the router's logits (M, E), M the number of tokens
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
        self.router = nn.Linear(hidden_size, spec.num_experts, bias=False)
        self.experts = Experts(hidden_size, spec)
        self.shared_expert = self.shared_gate = None
        if spec.shared_size:
            shared = MLPSpec(spec.shared_size, spec.activation, gated=spec.gated, bias=False)
            self.shared_expert = MLP(hidden_size, shared)
            if spec.shared_gate:
                self.shared_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' weighed sum and the router's logits."""
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        weights, index = self._route(logits)
        run: RunExperts = self.experts
        if self.capacity_factor is not None and self.training:
            even = index.numel() / self.num_experts
            index = limit_loads(index, self.num_experts, math.ceil(self.capacity_factor * even))
            run = partial(_run_limited, run)
        parts = self.dispatch(self.enter(tokens), index, self.num_experts, run)
        out = parts.squeeze(1)
        if weights is not None:
            out = (parts * self.enter(weights).to(parts.dtype).unsqueeze(-1)).sum(1)
        out = self.leave(out)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(tokens)) * shared
            out = out + shared
        return out.view_as(x), logits

    def _route(self, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """Pick k experts for every token: their weights, if any, and numbers, (M, k) each."""
        if self.choice == "balanced":
            index = self.assign(logits) if self.training else logits.argmax(-1)
            return None, index.unsqueeze(-1)
        wide = logits.to(wide_dtype(logits.dtype))
        weights, index = F.softmax(wide, dim=-1).topk(self.experts_per_token, dim=-1)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, index


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    experts_per_token: int,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return how unevenly tokens go to experts: k for an even load, up to E for one expert alone.

    ``E * sum over e of (C[e] / N) * (P[e] / N)``, where over the tokens of all layers together C
    counts those that expert e works on, P sums its probabilities, and N counts tokens. A product
    of means is not the mean of products: where a step's tokens come in several parts, C and N must
    be of all of them (`count_loads`, `balance_loads`); the loss is linear in P.

    Args:
        router_logits: of every layer with experts.
        experts_per_token: k.
        attention_mask: 1 for tokens that count, 0 for padding.

    Shape:
        router_logits: (M, E) each; attention_mask: M elements in all; returns a scalar

    Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6, as transformers extends
    them to k experts and all layers.
    """
    return balance_loads(*count_loads(router_logits, experts_per_token, attention_mask))


def count_loads(
    router_logits: Sequence[Tensor], experts_per_token: int, counted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return C, P and N of `load_balancing_loss`; only P has a gradient.

    Shape:
        router_logits: (M, E) each; counted: M elements in all; returns (E,), (E,), (1,)
    """
    logits = torch.stack(tuple(router_logits))
    wide = logits.to(wide_dtype(logits.dtype))
    probability = F.softmax(wide, dim=-1)
    _, index = probability.detach().topk(experts_per_token, dim=-1)
    weight = torch.ones_like(probability[..., :1])
    if counted is not None:
        weight = weight * counted.reshape(1, -1, 1).to(weight.dtype)
    chosen = torch.zeros_like(probability).scatter_(-1, index, weight.expand_as(index))
    return chosen.sum((0, 1)), (probability * weight).sum((0, 1)), weight.sum().view(1)


def balance_loads(loads: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
    """Return the balance of C, P and N; 0 where there are no tokens.

    Shape:
        loads, sums: (E,); tokens: (1,); returns a scalar
    """
    tokens = tokens.clamp(min=1)
    return loads.shape[0] * (loads / tokens * (sums / tokens)).sum()
