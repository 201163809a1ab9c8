"""Gates that training opens and closes: on heads, widths, features, halves, blocks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bmforge.device import wide_dtype
from bmforge.errors import ConfigError
from bmforge.nn.part import TensorNote

__all__ = ["HardConcrete", "HeadDims", "HiddenWidth", "log_alpha_of"]

# Of the hard concrete distribution: how far it is stretched to both sides, its temperature, and
# how near to 0 and 1 a draw may be.
_LOW, _HIGH, _BETA, _EPS = -0.1, 1.1, 2 / 3, 1e-6
_SHIFT = _BETA * math.log(-_LOW / _HIGH)


def log_alpha_of(sparsity: float) -> float:
    """Return the parameter with which a gate is closed so often.

    Raises:
        ConfigError: not between 0 and 1.
    """
    if not 0 < sparsity < 1:
        raise ConfigError(f"sparsity={sparsity} of a gate must be between 0 and 1.")
    return math.log(1 / sparsity - 1) + _SHIFT


class HardConcrete(nn.Module):
    """One gate for each of some units: drawn from 0 to 1 in training, what is likely otherwise.

    What a gate draws depends on the seed, the step and its name alone, so it is the same on every
    layout, in every micro-batch and when a block is run again.

    Args:
        name: of the gate; decides with seed and step what it draws.
        units: how many parts are gated.
        width: how many features they are together, neighbours belonging to one unit; 0 is `units`.
        start: how often each is closed at first.

    Attributes:
        delta: what training changes: log alpha, less where it began.
        share: which share of the features is here, and how many shares there are; a layout that
            cuts them sets it.
        mask: None, or which units stay, once that is decided: (units,) of 0 and 1.

    Shape:
        x: (..., width here) -> same; or x before and after a part of a block, of any width

    Source: Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization"
        (2018), with BMCook's constants. BMCook draws without the stretch, so its gates never close,
        and cuts the gradient between task and gate.
    """

    def __init__(self, name: str, units: int, width: int = 0, start: float = 0.1) -> None:
        super().__init__()
        self.gate_name, self.units, self.width = name, units, width or units
        if self.width % units:
            raise ConfigError(
                f"{name}: {units} gates of one width do not fit {self.width} features."
            )
        self.start = log_alpha_of(start)
        self.delta = nn.Parameter(torch.zeros(units))
        self.share = (0, 1)
        self.mask: Tensor | None = None
        self.noise: Tensor | None = None

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Gates begin a little apart."""
        return {"delta": TensorNote(0.01)}

    @torch.no_grad()
    def draw_(self, seed: int, step: int) -> None:
        """Draw the noise of a step."""
        text = f"{seed}/{step}/{self.gate_name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.rand(self.units, generator=generator, dtype=torch.float64)
        drawn = _EPS + (1 - 2 * _EPS) * drawn
        noise = drawn.log() - (-drawn).log1p()
        self.noise = noise if self.delta.is_meta else noise.to(self.delta.device)

    def values(self) -> Tensor:
        """Return how far each unit's gate is open, (units,): in the graph of the loss."""
        if self.mask is not None:
            return self.mask.to(self.delta.device)
        alpha = self.delta.to(wide_dtype(self.delta.dtype)) + self.start
        if self.training and self.noise is not None:
            alpha = (self.noise.to(alpha) + alpha) / _BETA
        return (torch.sigmoid(alpha) * (_HIGH - _LOW) + _LOW).clamp(0, 1)

    def density(self, delta: Tensor | None = None) -> Tensor:
        """Return how likely each gate is not closed, (units,).

        Args:
            delta: whole, where a layout keeps parts of it in several places.
        """
        alpha = (self.delta if delta is None else delta).double() + self.start
        return torch.sigmoid(alpha - _SHIFT)

    def forward(self, x: Tensor, after: Tensor | None = None) -> Tensor:
        """Scale every unit by its gate; of a part of a block, how far it goes on."""
        values = self.values().to(x.dtype)
        if after is not None:
            return x + values * (after - x)
        return self._scale(x, values.repeat_interleave(self.width // self.units))

    def _scale(self, x: Tensor, wide: Tensor) -> Tensor:
        """Scale the features that are here by theirs among those of all features."""
        rank, size = self.share
        if size > 1:
            wide = wide.narrow(0, rank * -(-self.width // size), x.shape[-1])
        return x * wide

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.gate_name}, units={self.units}, width={self.width}"


class HeadDims(HardConcrete):
    """A gate on the width of heads: a unit is a dim of one key-value head, or a pair of dims.

    It scales what goes into `o_proj`, and with `asks` queries, so that dims of both sides go with a
    unit. Rotary dims go in pairs and in one order, as those of a narrower head have the speeds of
    the first pairs: the widest open unit scales the first pair of queries, and so on.

    Args:
        name: of the gate.
        groups: K, key-value heads.
        heads: N.
        head_dim: H.
        order: of rotary heads all dims of a query, pair after pair, the one that stays longest
            first; empty lets a unit be the same dim of values and of queries.

    Shape:
        x: (..., heads here * H) -> same
    """

    def __init__(
        self, name: str, groups: int, heads: int, head_dim: int, order: Sequence[int] = ()
    ) -> None:
        self.step = 2 if order else 1
        super().__init__(name, groups * (head_dim // self.step), heads * head_dim)
        self.groups, self.order = groups, tuple(order)

    def _widen(self, values: Tensor) -> Tensor:
        """Return values of units, (K, units), for the dims of every query head: (N, H)."""
        dims = values.repeat_interleave(self.step, 1)
        return dims.repeat_interleave(self.width // dims.numel(), 0)

    def forward(self, x: Tensor, after: Tensor | None = None, asks: bool = False) -> Tensor:
        """Scale every dim of what heads have mixed; or, where `x` asks, of queries."""
        assert after is None, "it is no part of a block"
        values = self.values().to(x.dtype).view(self.groups, -1)
        if not asks or not self.order:
            return self._scale(x, self._widen(values).flatten())
        sorted_first = self._widen(values.sort(-1, descending=True).values)
        places = torch.tensor(self.order, device=x.device).argsort()
        return self._scale(x, sorted_first[:, places].flatten())


class HiddenWidth(HardConcrete):
    """A gate on every hidden feature, for all of a model: one stands where anything writes some.

    Called without an argument it returns its values, for norms.

    Shape:
        x: (..., D) -> same; returns (D,) without x
    """

    def forward(  # type: ignore[override]
        self, x: Tensor | None = None, after: Tensor | None = None
    ) -> Tensor:
        """Scale what is written into hidden features, or return by how much."""
        assert after is None, "it is no part of a block"
        return self.values() if x is None else x * self.values().to(x.dtype)
