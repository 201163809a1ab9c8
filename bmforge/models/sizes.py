"""Sizes of a model's layers, and their sizes after resizing.

`LayerSizes` is used to compute costs (FLOPs, KV cache size); `Sizes` contains the options of the
change "resize". `resize.py` rebuilds the modules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from bmforge.errors import ConfigError
from bmforge.nn import BlockSpec, MLPSpec, MoESpec
from bmforge.nn.attention_spec import LatentSpec
from bmforge.nn.router import RouterKind

__all__ = ["LayerSizes", "Sizes", "feed_sizes", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """New sizes of layers; fields that are None do not change.

    Args:
        num_heads: number N of heads.
        num_kv_heads: number K of key-value heads; by default unchanged, or N if they were equal.
        head_dim: width H of a head.
        intermediate_size: hidden width F of the MLP or of every expert.
        attn: False to remove self-attention and its norm.
        mlp: False to remove the MLP or experts and their norm.
        num_experts: number E of experts; they replace the MLP if there is one.
        experts_per_token: number k of experts per token.
        split: split the MLP into experts: each gets (F - shared_size) / E of its hidden features,
            and the outputs of the selected experts are summed.
        shared_size: number of leading MLP features that form the shared expert; needs `split`.
        router: kind of router, see `nn.MoESpec`; needs `split`.
        choice: selection of experts per token ("top_k") or per call ("per_call"); needs `split`.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    attn: bool | None = None
    mlp: bool | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    split: bool | None = None
    shared_size: int | None = None
    router: RouterKind | None = None
    choice: Literal["top_k", "per_call"] | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: value for name, value in values.items() if value is not None}
        problems = ["no size is changed"] * (not values)
        for name, value in values.items():
            if name in _WORDS:
                if value not in _WORDS[name]:
                    allowed = ", ".join(map(repr, _WORDS[name]))
                    problems.append(f"{name}={value!r} must be one of {allowed}")
            elif name in ("attn", "mlp"):
                if value is not False:
                    problems.append(f"{name}={value!r} must be False, which removes the sublayer")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(f"{name}={value!r} must be a positive integer")
        heads = self.num_heads or self.num_kv_heads or self.head_dim
        feed = self.intermediate_size or self.num_experts or self.experts_per_token
        if self.split and (not self.num_experts or self.intermediate_size):
            problems.append("split=True needs num_experts, which determines intermediate_size")
        if not self.split and (self.shared_size or self.router or self.choice):
            problems.append("shared_size, router and choice need split=True")
        if self.mlp is False and feed:
            problems.append("mlp=False cannot be combined with sizes of the MLP")
        if self.attn is False and heads:
            problems.append("attn=False cannot be combined with sizes of the attention")
        if problems:
            raise ConfigError(f"resize: {'; '.join(problems)}. The sizes are {', '.join(_NAMES)}.")


_NAMES = [f.name for f in fields(Sizes)]
_WORDS: dict[str, tuple[Any, ...]] = {
    "split": (True,),
    "router": ("linear", "two_layer"),
    "choice": ("top_k", "per_call"),
}


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer.

    Args:
        num_heads: number N of heads; 0 without attention.
        num_kv_heads: number K of key-value heads.
        head_dim: width H of a head.
        intermediate_size: hidden width F of the MLP or of every expert; 0 without an MLP.
        gated: True if the MLP has a gate.
        attn: True if the layer has self-attention.
        cross: True if the layer has cross-attention.
        num_experts: number E of experts; 0 for an MLP.
        experts_per_token: number k of experts per token.
        shared_size: hidden width F of the shared expert; 0 for none.
        shared_gate: True if the shared expert has its own gate.
        two_layers: True if the router has a second layer of size E x E.
        latent: sizes of latent attention; None for other attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    gated: bool = False
    attn: bool = True
    cross: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    shared_size: int = 0
    shared_gate: bool = False
    two_layers: bool = False
    latent: LatentSpec | None = None

    def __str__(self) -> str:
        """Return a description of the layer for messages."""
        parts = []
        for exists, name in ((self.attn, "attention"), (self.cross, "attention to the source")):
            if exists:
                heads = f"{self.num_heads} heads"
                if self.num_kv_heads != self.num_heads:
                    heads += f" on {self.num_kv_heads} key-value heads"
                parts.append(f"{name} of {heads} of {self.head_dim}")
        if self.num_experts:
            parts.append(
                f"{self.experts_per_token} of {self.num_experts} experts of "
                f"{self.intermediate_size}"
            )
        elif self.intermediate_size:
            parts.append(f"an MLP of {self.intermediate_size}")
        return ", ".join(parts) or "nothing"

    def count_weights(self, hidden_size: int) -> int:
        """Return the number of linear weights that process one token of width `hidden_size`."""
        inner = self.head_dim * (self.num_heads + self.num_kv_heads)
        attention = 2 * hidden_size * inner * self.num_attentions
        if self.latent is not None:
            attention = self._count_latent(self.latent, hidden_size)
        each = 3 if self.gated else 2
        width = self.intermediate_size * (self.experts_per_token or 1) + self.shared_size
        router = self.num_experts**2 * self.two_layers
        feed = hidden_size * (each * width + self.num_experts + self.shared_gate)
        return attention + feed + router

    def _count_latent(self, latent: LatentSpec, hidden_size: int) -> int:
        """Return the number of linear weights in latent attention."""
        queries = self.num_heads * self.head_dim
        plain = self.head_dim - latent.rope_dim + latent.value_dim
        into = latent.kv_rank + latent.rope_dim + (latent.q_rank or queries)
        out = self.num_heads * latent.value_dim
        return (
            hidden_size * (into + out)
            + latent.q_rank * queries
            + latent.kv_rank * self.num_heads * plain
        )

    @property
    def num_attentions(self) -> int:
        """Number of attention sublayers."""
        return self.attn + self.cross

    @property
    def products(self) -> int:
        """Multiplications per (query, key) pair in attention scores: N x H per attention."""
        return self.num_heads * self.head_dim * self.num_attentions

    @property
    def kv_width(self) -> int:
        """Number of values per token in the KV cache."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_attentions

    def resized(self, sizes: Sizes, name: str = "a layer") -> LayerSizes:
        """Return the sizes after resizing.

        Raises:
            ConfigError: the layer lacks a sublayer to resize, or the sizes are inconsistent.
        """
        problems = []
        heads = sizes.num_heads or sizes.num_kv_heads or sizes.head_dim
        if (heads and not self.num_attentions) or (sizes.attn is False and not self.attn):
            problems.append("it has no attention")
        feed = sizes.intermediate_size or sizes.num_experts or sizes.experts_per_token
        if (feed or sizes.mlp is False) and not self.intermediate_size:
            problems.append("it has no MLP")
        if sizes.experts_per_token and not (self.num_experts or sizes.num_experts):
            problems.append("it has no experts, so experts_per_token needs num_experts")
        if self.latent is not None and heads:
            problems.append("its latent attention has no heads that can be removed")
        if sizes.split and self.num_experts:
            problems.append(
                "it has experts already, and split=True applies to an MLP without experts"
            )
        elif sizes.split and (self.intermediate_size - (sizes.shared_size or 0)) % (
            sizes.num_experts or 1
        ):
            problems.append(_nearest_experts(self.intermediate_size, sizes))
        new = self._with(sizes)
        if new.num_kv_heads and new.num_heads % new.num_kv_heads:
            problems.append(
                f"num_heads={new.num_heads} must be a multiple of num_kv_heads={new.num_kv_heads}"
            )
        if new.experts_per_token > new.num_experts:
            problems.append(
                f"experts_per_token={new.experts_per_token} must not exceed "
                f"num_experts={new.num_experts}"
            )
        if not problems and new == self:
            problems.append("it already has these sizes")
        if problems:
            raise ConfigError(f"{name} cannot be resized: {'; '.join(problems)}.")
        return new

    def _with(self, sizes: Sizes) -> LayerSizes:
        changes = {f.name: getattr(sizes, f.name) for f in fields(sizes)}
        changes = {
            name: value for name, value in changes.items() if value is not None and name != "mlp"
        }
        if "num_heads" in changes and self.num_kv_heads == self.num_heads:
            changes.setdefault("num_kv_heads", changes["num_heads"])
        if "num_experts" in changes and not self.num_experts:
            changes.setdefault("experts_per_token", 1)
        changes.pop("attn", None)
        if sizes.split:
            changes["two_layers"] = sizes.router == "two_layer"
            remaining = self.intermediate_size - (sizes.shared_size or 0)
            changes["intermediate_size"] = remaining // (sizes.num_experts or 1)
        changes = {name: value for name, value in changes.items() if name not in _WORDS}
        return replace(self, **changes).without(sizes.attn is False, sizes.mlp is False)

    def without(self, attn: bool, mlp: bool) -> LayerSizes:
        """Return the sizes without self-attention if `attn`, and without the MLP if `mlp`."""
        new = replace(self, attn=False, latent=None) if attn else self
        if mlp:
            new = replace(new, **feed_sizes(None))
        return new if new.num_attentions else replace(new, num_heads=0, num_kv_heads=0, head_dim=0)


def _nearest_experts(width: int, sizes: Sizes) -> str:
    """Return an error message with the nearest number of experts that divides the MLP evenly."""
    remaining, count = width - (sizes.shared_size or 0), sizes.num_experts or 1
    fits = sorted(
        (n for n in range(1, remaining + 1) if remaining % n == 0), key=lambda n: abs(n - count)
    )
    return (
        f"num_experts={count} does not divide the {remaining} features (nearest divisor: "
        f"{fits[0] if fits else 1})"
    )


def sizes_of(block: BlockSpec) -> LayerSizes:
    """Return the layer sizes of a block spec."""
    heads = block.attn or block.cross_attn
    sizes = LayerSizes(
        heads.num_heads if heads else 0,
        heads.num_kv_heads if heads else 0,
        heads.head_dim if heads else 0,
        0 if block.mlp is None else block.mlp.intermediate_size,
        attn=block.attn is not None,
        cross=block.cross_attn is not None,
        latent=None if block.attn is None else block.attn.latent,
    )
    return replace(sizes, **feed_sizes(block.mlp))


def feed_sizes(mlp: MLPSpec | MoESpec | None) -> dict[str, Any]:
    """Return the fields of `LayerSizes` that depend on the feed-forward sublayer."""
    if mlp is None:
        return dict.fromkeys(_FEED, 0) | dict.fromkeys(_FLAGS, False)
    if isinstance(mlp, MLPSpec):
        values = {"intermediate_size": mlp.intermediate_size, "gated": mlp.gated}
        return feed_sizes(None) | values
    values = {name: getattr(mlp, name) for name in (*_FEED, "gated")}
    two_layers = mlp.router == "two_layer"
    return values | {
        "shared_gate": bool(mlp.shared_size) and mlp.shared_gate,
        "two_layers": two_layers,
    }


_FLAGS = ("gated", "shared_gate", "two_layers")
_FEED = ("intermediate_size", "num_experts", "experts_per_token", "shared_size")
