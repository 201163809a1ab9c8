"""A low-rank part beside a linear layer: what it adds is ``scale * up(down(x))``.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.grouped import grouped_linear
from bmforge.nn.part import BesidePart, TensorNote, find_like

__all__ = ["ExpertsLowRank", "LowRank", "linear_sizes"]


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a layer that multiplies by a matrix; None for any other module.

    Known are torch's Linear, what is stored in its place, and transformers' Conv1D.
    """
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    weight = getattr(module, "weight", None)
    if hasattr(module, "nf") and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _check_numbers(sizes: tuple[int, int], rank: int, alpha: float | None, dropout: float) -> float:
    """Return the factor on what a part adds to a layer of (in, out)."""
    if not 1 <= rank <= min(sizes):
        raise ConfigError(
            f"rank={rank} must lie between 1 and {min(sizes)}, the smaller side of a layer "
            f"from {sizes[0]} to {sizes[1]}."
        )
    if alpha is not None and not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(f"alpha={alpha} must be finite and above 0, or nothing would be added.")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout={dropout} must be at least 0 and below 1.")
    return 1.0 if alpha is None else alpha / rank


class LowRank(BesidePart):
    """``scale * x @ down.T @ up.T``, added to what a linear layer makes of x.

    Args:
        in_features: of the layer.
        out_features: of the layer.
        rank: R.
        scale: factor on what is added.
        dropout: of what goes in, in training.
        like: gives dtype and device.

    Shape:
        x: (..., in) -> (..., out)
    """

    cut_styles: ClassVar[frozenset[str]] = frozenset({"", "column", "key_value", "row", "head"})

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        scale: float = 1.0,
        dropout: float = 0.0,
        like: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout
        made = {} if like is None else {"dtype": like.dtype, "device": like.device}
        self.down = nn.Parameter(torch.empty(rank, in_features, **made))
        self.up = nn.Parameter(torch.empty(out_features, rank, **made))

    @classmethod
    def beside(
        cls, module: nn.Module, rank: int, alpha: float | None = None, dropout: float = 0.0
    ) -> LowRank:
        """Return a part for a layer; it is not attached and, on meta or not, not drawn.

        Args:
            module: a linear layer.
            rank: R, from 1 to the layer's smaller side.
            alpha: `scale` is alpha / R; None is 1.
            dropout: of what goes in.

        Raises:
            ConfigError: no linear layer, or numbers that its part cannot have.
        """
        sizes = linear_sizes(module)
        if sizes is None:
            raise ConfigError(
                f"a low-rank part stands beside a linear layer, not a {type(module).__name__}."
            )
        scale = _check_numbers(sizes, rank, alpha, dropout)
        return cls(*sizes, rank, scale, dropout, find_like(module))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """`up` starts at zero, so nothing changes at first; the cut dim follows the layer's."""
        outs = {"column": 0, "key_value": 0, "head": 0}
        spread = 1 / math.sqrt(3 * self.down.shape[1])
        return {
            "down": TensorNote(spread, {"row": 1}),
            "up": TensorNote("zeros", outs),
        }

    def forward(self, x: Tensor, factors: bool = False) -> Any:
        """Return what is added to the layer's result, or with `factors` the two that make it."""
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        low = F.linear(x.to(self.down.dtype), self.down) * self.scale
        return (low, self.up) if factors else F.linear(low, self.up)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (..., R) and (out, R), whose product is what is added.

        It goes through the module's call, where layouts show what is here of the tensors.
        """
        return self(x, factors=True)

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Add it."""
        return out + self(inputs[0]).to(out.dtype)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"rank={self.down.shape[0]}, scale={self.scale}, dropout={self.dropout}"


class ExpertsLowRank(BesidePart):
    """Low-rank parts of stacked experts, one for every matrix of every expert.

    Args:
        sizes: name of a stack -> (E, out, in).
        rank: R.
        scale: factor on what is added.
        like: gives dtype and device.
        dropout: of what goes into each, in training.
    """

    cut_styles: ClassVar[frozenset[str]] = frozenset({"", "experts"})

    def __init__(
        self,
        sizes: Mapping[str, tuple[int, int, int]],
        rank: int,
        scale: float,
        like: Tensor,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale, self.dropout, self.keys = scale, dropout, tuple(sizes)
        made = {"dtype": like.dtype, "device": like.device}
        for key, (experts, outs, ins) in sizes.items():
            down, up = (experts, rank, ins), (experts, outs, rank)
            self.register_parameter(f"{key}_down", nn.Parameter(torch.empty(down, **made)))
            self.register_parameter(f"{key}_up", nn.Parameter(torch.empty(up, **made)))

    @classmethod
    def beside(
        cls, experts: nn.Module, rank: int, alpha: float | None = None, dropout: float = 0.0
    ) -> ExpertsLowRank:
        """Return a part for stacked experts; see `LowRank.beside`."""
        module: Any = experts
        sizes = module.stack_sizes()
        for _, outs, ins in sizes.values():
            scale = _check_numbers((ins, outs), rank, alpha, dropout)
        return cls(sizes, rank, scale, find_like(experts), dropout)

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Each expert is cut by its width, and so are the sides of its parts that have it."""
        notes = {}
        for key in self.keys:
            is_last = key == "down_proj"
            spread = 1 / math.sqrt(3 * getattr(self, f"{key}_down").shape[2])
            notes[f"{key}_down"] = TensorNote(spread, {"experts": 2} if is_last else {})
            notes[f"{key}_up"] = TensorNote("zeros", {} if is_last else {"experts": 1})
        return notes

    def forward(self, key: str, x: Tensor, ends: Tensor) -> Tensor:
        """Return what is added to the rows that the stack `key` made of x."""
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        low = grouped_linear(x, getattr(self, f"{key}_down"), ends) * self.scale
        return grouped_linear(low, getattr(self, f"{key}_up"), ends)
