"""LoRA modules for linear layers, embeddings and experts, which add ``scale * up(down(x))``.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models" (2021); for the scale alpha
/ sqrt(rank), Kalajdzievski, "A rank stabilization scaling factor" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.grouped import grouped_linear
from bmforge.nn.low_rank_sum import AddLowRank, can_use_low_rank_sum
from bmforge.nn.part import AdapterModule, TensorNote, find_like
from bmforge.surgery import match_glob

__all__ = [
    "EmbeddingLowRank",
    "ExpertsLowRank",
    "LowRank",
    "LowRankOptions",
    "build_low_rank",
    "linear_sizes",
    "init_magnitudes_",
]


@dataclass(frozen=True)
class LowRankOptions:
    """Options of the adapter kind "low_rank" (LoRA).

    Args:
        rank: rank R of the update.
        alpha: numerator of the scale alpha / R; None means a scale of 1.
        dropout: dropout probability of the input, in training.
        use_rslora: use the scale alpha / sqrt(R) (rsLoRA).
        use_dora: train the norm of every row of the adapted weight (DoRA); linear layers only.
        bias: train a bias of `up` (`lora_bias` in PEFT); linear layers only, not with `use_dora`.
        ranks: dict from module name glob to rank; overrides `rank`.
        alphas: dict from module name glob to alpha; overrides `alpha`.
        trainable_token_indices: dict from the name of an embedding or head to the ids of tokens
            whose rows are trained as well; see `nn.token_rows`.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    bias: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    trainable_token_indices: dict[str, list[int]] = field(default_factory=dict)

    def of(self, name: str) -> LowRankOptions:
        """Return the options of one module, with its own rank and alpha."""
        rank = next((r for g, r in self.ranks.items() if match_glob(name, g)), self.rank)
        alpha = next((a for g, a in self.alphas.items() if match_glob(name, g)), self.alpha)
        return replace(self, rank=rank, alpha=alpha, ranks={}, alphas={})

    def scale_of(self, sizes: tuple[int, int]) -> float:
        """Return the scale of the update for a layer of the given (in, out) sizes.

        Raises:
            ConfigError: the layer does not support the options.
        """
        rank, alpha = self.rank, self.alpha
        if not 1 <= rank <= min(sizes):
            raise ConfigError(
                f"rank={rank} is out of range for a layer with {sizes[0]} input and {sizes[1]} "
                f"output features (allowed: 1 to {min(sizes)})."
            )
        if alpha is not None and not (alpha > 0 and math.isfinite(alpha)):
            raise ConfigError(
                f"alpha={alpha} must be finite and above 0; with 0, the adapter would have no "
                "effect."
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1.")
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear layer; None for any other module.

    Supported are torch's Linear, its quantized replacements, transformers' Conv1D, and linear
    layers of other libraries with the same attributes, or with `dim_in` and `dim_out`.
    """
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    weight = getattr(module, "weight", None)
    if hasattr(module, "dim_in") and hasattr(module, "dim_out") and isinstance(weight, Tensor):
        return int(module.dim_in), int(module.dim_out)
    if hasattr(module, "nf") and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def build_low_rank(name: str, module: nn.Module, options: LowRankOptions) -> AdapterModule:
    """Build the LoRA module of a linear layer, a head, an embedding or stacked experts.

    Args:
        name: name of the module.
        module: module to adapt.
        options: see `LowRankOptions`.

    Raises:
        ConfigError: the module is of a different kind, or does not support the options.
    """
    options = options.of(name)
    if isinstance(module, nn.Embedding):
        return EmbeddingLowRank.for_module(module, options)
    if hasattr(module, "stack_sizes"):
        return ExpertsLowRank.for_module(module, options)
    return LowRank.for_module(module, options)


# Styles of `models.TensorParallelRule` that shard a linear layer by its outputs or inputs.
_BY_OUTPUTS = ("column", "key_value", "own_column", "gathered_column")
_BY_INPUTS = ("row", "split_row")
_LINEAR_STYLES = (*_BY_OUTPUTS, *_BY_INPUTS)


class LowRank(AdapterModule):
    """LoRA of a linear layer: adds ``scale * x @ down.T @ up.T`` to its output.

    Args:
        in_features: number of input features of the layer.
        out_features: number of output features of the layer.
        options: rank and other options.
        like: tensor with the dtype and device to use.

    Shape:
        x: (..., in) -> (..., out)
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset(
        {"", "head", "shared_tail", *_LINEAR_STYLES}
    )

    def __init__(
        self, in_features: int, out_features: int, options: LowRankOptions, like: Tensor
    ) -> None:
        super().__init__()
        self.scale, self.dropout = options.scale_of((in_features, out_features)), options.dropout
        like_options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.down = nn.Parameter(torch.empty(options.rank, in_features, **like_options))
        self.up = nn.Parameter(torch.empty(out_features, options.rank, **like_options))
        self.bias = self.magnitude = None
        if options.bias:
            self.bias = nn.Parameter(torch.empty(out_features, **like_options))
        if options.use_dora:
            self.magnitude = nn.Parameter(torch.empty(out_features, **like_options))
        # A bias cannot be added to an output that is still to be all-reduced.
        if options.bias or options.use_dora:
            self.sharding_styles = frozenset({"", *_BY_OUTPUTS})  # type: ignore[misc]

    @classmethod
    def for_module(cls, module: nn.Module, options: LowRankOptions) -> LowRank:
        """Build the LoRA module of a linear layer; it is neither attached nor initialized.

        Args:
            module: linear layer to adapt.
            options: rank and other options.

        Raises:
            ConfigError: the module is not a linear layer, or does not support the options.
        """
        sizes = linear_sizes(module)
        if sizes is None:
            raise ConfigError(
                "a low-rank adapter needs a linear layer, but the target is a "
                f"{type(module).__name__}. Choose other targets."
            )
        if options.use_dora:
            from bmforge.nn.dora import check_layer  # few models use DoRA

            check_layer(module)
        if options.use_dora and options.bias:
            raise ConfigError("use_dora and bias cannot be used together. Leave one of them out.")
        if (options.use_dora or options.bias) and getattr(module, "applies_adapters", False):
            raise ConfigError(
                "use_dora and bias are not supported on the head of a language model. Leave "
                "use_dora and bias out, or choose other targets."
            )
        return cls(*sizes, options, find_like(module))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization (`up` is zero) and the sharding, which matches the layer."""
        outs, ins = dict.fromkeys((*_BY_OUTPUTS, "head"), 0), dict.fromkeys(_BY_INPUTS, 1)
        spread = 1 / math.sqrt(3 * self.down.shape[1])
        notes = {"down": TensorNote(spread, ins), "up": TensorNote("zeros", outs)}
        if self.bias is not None:
            notes["bias"] = TensorNote("zeros", outs)
        if self.magnitude is not None:
            notes["magnitude"] = TensorNote("ones", outs)
        return notes

    def forward(
        self, x: Tensor, want: str = "added", out: Tensor | None = None, layer: Any = None
    ) -> Any:
        """Return the low-rank update of the layer's output, or `out` plus the update.

        With `want` set to "factors" or "all", the low-rank factors are returned instead. Do not
        read them as attributes: parallel layouts use local shards only during a module call.

        Args:
            x: input of the layer.
            want: name of the result: "added" for the update, "factors" for (low, up), "all" for
                (low, up, down, magnitude).
            out: output of the layer; if given, this output plus the update is returned.
            layer: layer with `multiply_adapted`, which has not computed its output yet; if given,
                its output plus the update is returned.
        """
        if layer is not None:
            is_plain = self.bias is None and not (self.dropout and self.training)
            if is_plain and can_use_low_rank_sum(x, self.down, self.up):
                return layer.multiply_adapted(x, self.down, self.up, self.scale)
            out = layer.multiply(x, layer.bias)
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        if out is not None:
            if self.bias is None and can_use_low_rank_sum(out, x, self.down, self.up):
                return AddLowRank.apply(out, x, self.down, self.up, self.scale)
            return out + self._update(x).to(out.dtype)
        low = F.linear(x.to(self.down.dtype), self.down) * self.scale
        if want == "all":
            return low, self.up, self.down, self.magnitude
        if want == "factors":
            return low, self.up
        return self._update(x)

    def _update(self, x: Tensor) -> Tensor:
        low = F.linear(x.to(self.down.dtype), self.down) * self.scale
        return F.linear(low, self.up, None if self.bias is None else self.bias * self.scale)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the update, (..., R) and (out, R)."""
        return self(x, "factors")

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Add the update to the layer's output."""
        return self(inputs[0], out=out)

    def _joined(
        self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor, weight: float
    ) -> Tensor:
        if self.magnitude is not None:
            from bmforge.nn.dora import join_with_magnitude

            return join_with_magnitude(self, module, inputs[0], out, weight)
        if weight != 1:
            return out + weight * self(inputs[0]).to(out.dtype)
        return self.join(inputs, out)

    def extra_repr(self) -> str:
        """Return rank, scale and dropout as text."""
        return f"rank={self.down.shape[0]}, scale={self.scale}, dropout={self.dropout}"


class EmbeddingLowRank(LowRank):
    """LoRA of an embedding: adds ``scale * down.T[ids] @ up.T`` to its output.

    Shape:
        ids: (...) -> (..., D)
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset({"", "embedding"})

    @classmethod
    def for_module(cls, module: nn.Module, options: LowRankOptions) -> EmbeddingLowRank:
        """Build the LoRA module of an embedding; see `LowRank.for_module`."""
        table: Any = module
        if options.use_dora or options.bias or options.dropout:
            raise ConfigError(
                "use_dora, bias and dropout are not supported on an embedding. Leave these "
                "options out, or choose other targets."
            )
        return cls(table.num_embeddings, table.embedding_dim, options, find_like(table))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization (`down`, the lookup table, is zero); no tensor is sharded."""
        return {"down": TensorNote("zeros"), "up": TensorNote(1.0)}

    def forward(
        self, x: Tensor, want: str = "added", out: Tensor | None = None, layer: Any = None
    ) -> Any:
        """Return the update of the embeddings of ids `x` or, with `out`, `out` plus the update.

        Only linear layers pass `layer`.
        """
        update = F.linear(F.embedding(x, self.down.t()) * self.scale, self.up)
        return update if out is None else out + update.to(out.dtype)


class ExpertsLowRank(AdapterModule):
    """LoRA of stacked experts: one update per matrix of each expert.

    Args:
        sizes: mapping from the name of each stacked matrix to its sizes (E, out, in).
        options: rank and other options.
        like: tensor with the dtype and device to use.
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset({"", "experts"})

    def __init__(
        self,
        sizes: Mapping[str, tuple[int, int, int]],
        options: LowRankOptions,
        like: Tensor,
    ) -> None:
        super().__init__()
        scales = {options.scale_of((ins, outs)) for _, outs, ins in sizes.values()}
        self.scale, self.dropout, self.keys = scales.pop(), options.dropout, tuple(sizes)
        rank = options.rank
        like_options = {"dtype": like.dtype, "device": like.device}
        for key, (experts, outs, ins) in sizes.items():
            down, up = (experts, rank, ins), (experts, outs, rank)
            self.register_parameter(f"{key}_down", nn.Parameter(torch.empty(down, **like_options)))
            self.register_parameter(f"{key}_up", nn.Parameter(torch.empty(up, **like_options)))

    @classmethod
    def for_module(cls, experts: nn.Module, options: LowRankOptions) -> ExpertsLowRank:
        """Build the LoRA module of stacked experts; see `LowRank.for_module`."""
        module: Any = experts
        if options.use_dora or options.bias:
            raise ConfigError(
                "use_dora and bias are not supported on stacked experts. Leave use_dora and "
                "bias out, or choose other targets."
            )
        return cls(module.stack_sizes(), options, find_like(experts))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the tensors' initialization and sharding, along the same dims as the experts."""
        notes = {}
        for key in self.keys:
            is_last = key == "down_proj"
            spread = 1 / math.sqrt(3 * getattr(self, f"{key}_down").shape[2])
            notes[f"{key}_down"] = TensorNote(spread, {"experts": 2} if is_last else {})
            notes[f"{key}_up"] = TensorNote("zeros", {} if is_last else {"experts": 1})
        return notes

    def forward(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Return the low-rank update of the output of the stacked matrix `key`.

        `x` is sorted by expert; `ends` has the index after the last row of each expert.
        """
        dtype = x.dtype
        x = x.to(getattr(self, f"{key}_down").dtype)
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        low = grouped_linear(x, getattr(self, f"{key}_down"), ends) * (self.scale * weight_of(self))
        return grouped_linear(low, getattr(self, f"{key}_up"), ends).to(dtype)


def init_magnitudes_(module: nn.Module, part: nn.Module) -> None:
    """Set the magnitudes of a DoRA module to the norms of the layer's rows; see `nn.dora`."""
    if isinstance(part, LowRank) and part.magnitude is not None:
        from bmforge.nn.dora import init_magnitude_

        init_magnitude_(module, part)
