"""How large the layers of a model are, each by itself, and what it takes to make some another size.

`LayerSizes` is what costs are counted from (FLOPs, caches); `Sizes` is what a change of kind
"resize" says. Modules are rebuilt in `resize.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from bmforge.errors import ConfigError
from bmforge.nn import BlockSpec, MLPSpec, MoESpec
from bmforge.nn.router import RouterKind

__all__ = ["LayerSizes", "Sizes", "feed_sizes", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """What is to become of layers; None leaves as it is.

    Args:
        num_heads: N.
        num_kv_heads: K; not given, it stays, and is N where it was.
        head_dim: H.
        intermediate_size: F, of every expert where there are experts.
        attn: False takes attention to itself away, with its norm.
        mlp: False takes the MLP or the experts away, with their norm.
        num_experts: E; of a layer with an MLP, experts in its place.
        experts_per_token: k.
        split: the experts in an MLP's place are its features, side by side, added up as they are;
            each has (F - shared_size) / E of them.
        shared_size: with `split`: so many features, the first, work on every token.
        router: with `split`: how experts are chosen; see `nn.MoESpec`, as for
        choice: per token ("top_k") or "per_call".
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
        """Check each by itself."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        problems = ["nothing is to change"] * (not given)
        for name, value in given.items():
            if name in _WORDS:
                if value not in _WORDS[name]:
                    known = ", ".join(map(repr, _WORDS[name]))
                    problems.append(f"{name}={value!r} must be {known}")
            elif name in ("attn", "mlp"):
                if value is not False:
                    problems.append(f"{name}={value!r} can only be False, which takes it away")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(f"{name}={value!r} must be a positive whole number")
        heads = self.num_heads or self.num_kv_heads or self.head_dim
        feed = self.intermediate_size or self.num_experts or self.experts_per_token
        if self.split and (not self.num_experts or self.intermediate_size):
            problems.append("split=True needs num_experts, from which intermediate_size follows")
        if not self.split and (self.shared_size or self.router or self.choice):
            problems.append("shared_size, router and choice belong to split=True")
        if self.mlp is False and feed:
            problems.append("an MLP that is taken away has no size")
        if self.attn is False and heads:
            problems.append("attention that is taken away has no heads")
        if problems:
            raise ConfigError(f"resize: {'; '.join(problems)}. Give some of {', '.join(_NAMES)}.")


_NAMES = [f.name for f in fields(Sizes)]
_WORDS: dict[str, tuple[Any, ...]] = {
    "split": (True,),
    "router": ("linear", "two_layer"),
    "choice": ("top_k", "per_call"),
}


@dataclass(frozen=True)
class LayerSizes:
    """How large a layer is.

    Args:
        num_heads: N; 0 without any attention.
        num_kv_heads: K.
        head_dim: H.
        intermediate_size: F, of every expert where there are experts; 0 without an MLP.
        gated: the MLP has a gate.
        attn: it attends to itself.
        cross: it attends to a memory.
        num_experts: E; 0 for an MLP.
        experts_per_token: k.
        shared_size: F of an expert that works on every token.
        shared_gate: that one has a gate of its own.
        two_layers: the router has a second layer, from experts to experts.
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

    def __str__(self) -> str:
        """Say it in words."""
        parts = []
        for there, name in ((self.attn, "attention"), (self.cross, "attention to the source")):
            if there:
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
        """Return how many weights of linear layers work on one token of width D."""
        inner = self.head_dim * (self.num_heads + self.num_kv_heads)
        attention = 2 * hidden_size * inner * self.num_attentions
        each = 3 if self.gated else 2
        width = self.intermediate_size * (self.experts_per_token or 1) + self.shared_size
        router = self.num_experts**2 * self.two_layers
        feed = hidden_size * (each * width + self.num_experts + self.shared_gate)
        return attention + feed + router

    @property
    def num_attentions(self) -> int:
        """How often it attends."""
        return self.attn + self.cross

    @property
    def products(self) -> int:
        """Width of what is multiplied with every key: N x H of all its attentions."""
        return self.num_heads * self.head_dim * self.num_attentions

    @property
    def kv_width(self) -> int:
        """Numbers that a token leaves in the cache."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_attentions

    def resized(self, sizes: Sizes, name: str = "a layer") -> LayerSizes:
        """Return the sizes after a change.

        Raises:
            ConfigError: the layer lacks what is to change, or its heads do not fit; all is said.
        """
        problems = []
        heads = sizes.num_heads or sizes.num_kv_heads or sizes.head_dim
        if (heads and not self.num_attentions) or (sizes.attn is False and not self.attn):
            problems.append("it has no attention")
        feed = sizes.intermediate_size or sizes.num_experts or sizes.experts_per_token
        if (feed or sizes.mlp is False) and not self.intermediate_size:
            problems.append("it has no MLP")
        if sizes.experts_per_token and not (self.num_experts or sizes.num_experts):
            problems.append("it has no experts: experts_per_token needs num_experts")
        if sizes.split and self.num_experts:
            problems.append("it has experts already: only an MLP can be split")
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
                f"experts_per_token={new.experts_per_token} is more than "
                f"num_experts={new.num_experts}"
            )
        if not problems and new == self:
            problems.append("it has these sizes already")
        if problems:
            raise ConfigError(f"{name} cannot be resized: {'; '.join(problems)}.")
        return new

    def _with(self, sizes: Sizes) -> LayerSizes:
        own = {f.name: getattr(sizes, f.name) for f in fields(sizes)}
        own = {name: value for name, value in own.items() if value is not None and name != "mlp"}
        if "num_heads" in own and self.num_kv_heads == self.num_heads:
            own.setdefault("num_kv_heads", own["num_heads"])
        if "num_experts" in own and not self.num_experts:
            own.setdefault("experts_per_token", 1)
        own.pop("attn", None)
        if sizes.split:
            own["two_layers"] = sizes.router == "two_layer"
            left = self.intermediate_size - (sizes.shared_size or 0)
            own["intermediate_size"] = left // (sizes.num_experts or 1)
        own = {name: value for name, value in own.items() if name not in _WORDS}
        return replace(self, **own).without(sizes.attn is False, sizes.mlp is False)

    def without(self, attn: bool, mlp: bool) -> LayerSizes:
        """Return what is left where the self-attention or the MLP is taken away."""
        new = replace(self, attn=False) if attn else self
        if mlp:
            new = replace(new, **feed_sizes(None))
        return new if new.num_attentions else replace(new, num_heads=0, num_kv_heads=0, head_dim=0)


def _nearest_experts(width: int, sizes: Sizes) -> str:
    """Say which numbers of experts divide an MLP's features."""
    left, count = width - (sizes.shared_size or 0), sizes.num_experts or 1
    fits = sorted((n for n in range(1, left + 1) if left % n == 0), key=lambda n: abs(n - count))
    return (
        f"num_experts={count} does not divide the {left} features that are split: the nearest that "
        f"does is {fits[0] if fits else 1}"
    )


def sizes_of(block: BlockSpec) -> LayerSizes:
    """Return the sizes that a block is built with."""
    heads = block.attn or block.cross_attn
    found = LayerSizes(
        heads.num_heads if heads else 0,
        heads.num_kv_heads if heads else 0,
        heads.head_dim if heads else 0,
        0 if block.mlp is None else block.mlp.intermediate_size,
        attn=block.attn is not None,
        cross=block.cross_attn is not None,
    )
    return replace(found, **feed_sizes(block.mlp))


def feed_sizes(mlp: MLPSpec | MoESpec | None) -> dict[str, Any]:
    """Return the fields of `LayerSizes` that a feed-forward part decides."""
    if mlp is None:
        return dict.fromkeys(_FEED, 0) | dict.fromkeys(_FLAGS, False)
    if isinstance(mlp, MLPSpec):
        found = {"intermediate_size": mlp.intermediate_size, "gated": mlp.gated}
        return feed_sizes(None) | found
    found = {name: getattr(mlp, name) for name in (*_FEED, "gated")}
    two_layers = mlp.router == "two_layer"
    return found | {
        "shared_gate": bool(mlp.shared_size) and mlp.shared_gate,
        "two_layers": two_layers,
    }


_FLAGS = ("gated", "shared_gate", "two_layers")
_FEED = ("intermediate_size", "num_experts", "experts_per_token", "shared_size")
