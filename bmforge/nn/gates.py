"""Trainable pruning gates for heads, head dimensions, neurons, sublayers and blocks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError
from bmforge.nn.part import TensorNote

__all__ = ["HardConcrete", "HeadDims", "HiddenWidth", "log_alpha_of"]

# Hard concrete distribution: the interval that it is stretched to, its temperature, and the
# distance of the uniform sample from 0 and 1.
_LOW, _HIGH, _BETA, _EPS = -0.1, 1.1, 2 / 3, 1e-6
_SHIFT = _BETA * math.log(-_LOW / _HIGH)


def log_alpha_of(sparsity: float) -> float:
    """Return the log alpha for which a hard concrete gate is closed with probability `sparsity`.

    Raises:
        ConfigError: `sparsity` is not between 0 and 1.
    """
    if not 0 < sparsity < 1:
        raise ConfigError(f"sparsity={sparsity} must be above 0 and below 1.")
    return math.log(1 / sparsity - 1) + _SHIFT


class HardConcrete(nn.Module):
    """Hard concrete gates, one per pruned unit (such as a head): sampled only in training.

    A gate's sample depends only on the seed, the step and the gate's name, so it is the same on
    every layout, in every micro-batch and in recomputation.

    Args:
        name: name of the gate; its generator is seeded by seed, step and this name.
        units: number of gated units.
        width: total number of features; each unit gates the same number of adjacent features; 0
            means one feature per unit.
        start: initial probability that a gate is closed.

    Attributes:
        delta: trained parameter: log alpha minus its initial value.
        share: (rank, size) in the tensor-parallel group that shards the features.
        mask: final decision per unit, (units,) of 0 and 1; None during training.

    Shape:
        x: (..., local width) -> same; `after`: hidden states after a sublayer, if given

    Source: Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization"
        (2018), with BMCook's constants. (BMCook samples without the stretch, so that its gates
        never close, and detaches the gate from the task's gradient.)
    """

    def __init__(self, name: str, units: int, width: int = 0, start: float = 0.1) -> None:
        super().__init__()
        self.gate_name, self.units, self.width = name, units, width or units
        if self.width % units:
            raise ConfigError(
                f"width={self.width} of the gates {name} must be a multiple of units={units}."
            )
        self.start = log_alpha_of(start)
        self.delta = nn.Parameter(torch.zeros(units))
        self.share = (0, 1)
        self.mask: Tensor | None = None
        self.noise: Tensor | None = None

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization of `delta`: close to zero, but different for each gate."""
        return {"delta": TensorNote(0.01)}

    @torch.no_grad()
    def draw_(self, seed: int, step: int) -> None:
        """Sample the gates' noise for a training step."""
        text = f"{seed}/{step}/{self.gate_name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        uniform = torch.rand(self.units, generator=generator, dtype=torch.float64)
        uniform = _EPS + (1 - 2 * _EPS) * uniform
        noise = uniform.log() - (-uniform).log1p()
        self.noise = noise if self.delta.is_meta else noise.to(self.delta.device)

    def values(self) -> Tensor:
        """Return each gate's value in [0, 1], (units,), with the autograd graph."""
        if self.mask is not None:
            return self.mask.to(self.delta.device)
        alpha = self.delta.to(accumulation_dtype(self.delta.dtype)) + self.start
        if self.training and self.noise is not None:
            alpha = (self.noise.to(alpha) + alpha) / _BETA
        return (torch.sigmoid(alpha) * (_HIGH - _LOW) + _LOW).clamp(0, 1)

    def density(self, delta: Tensor | None = None) -> Tensor:
        """Return the probability that each gate is open, (units,).

        Args:
            delta: the all-gathered parameter if it is sharded; None means the module's own.
        """
        alpha = (self.delta if delta is None else delta).double() + self.start
        return torch.sigmoid(alpha - _SHIFT)

    def forward(self, x: Tensor, after: Tensor | None = None) -> Tensor:
        """Scale each unit by its gate; with `after`, interpolate between `x` and `after`."""
        values = self.values().to(x.dtype)
        if after is not None:
            return x + values * (after - x)
        return self._scale(x, values.repeat_interleave(self.width // self.units))

    def _scale(self, x: Tensor, wide: Tensor) -> Tensor:
        """Scale this rank's features; `wide` has the gate values of the features of all ranks."""
        rank, size = self.share
        if size > 1:
            wide = wide.narrow(0, rank * -(-self.width // size), x.shape[-1])
        return x * wide

    def extra_repr(self) -> str:
        """Return the gate's name and sizes as text."""
        return f"{self.gate_name}, units={self.units}, width={self.width}"


class HeadDims(HardConcrete):
    """Gates on head dimensions: a unit is one dimension of a key-value head, or one rotary pair.

    The gate scales the input of `o_proj` and, with `for_queries`, the queries: pruning a unit
    removes a dimension of values and of queries. A pruned rotary head keeps the frequencies of the
    first pairs, so the gates are sorted for queries: the most open gate scales the first pair, and
    so on.

    Args:
        name: name of the gate.
        groups: number K of key-value heads.
        heads: number N of query heads.
        head_dim: width H of a head.
        order: all query dimensions of rotary heads, pair by pair, starting with the pair to prune
            last; empty if a unit is the same dimension of values and queries.

    Shape:
        x: (..., local heads * H) -> same
    """

    def __init__(
        self, name: str, groups: int, heads: int, head_dim: int, order: Sequence[int] = ()
    ) -> None:
        self.step = 2 if order else 1
        super().__init__(name, groups * (head_dim // self.step), heads * head_dim)
        self.groups, self.order = groups, tuple(order)

    def _widen(self, values: Tensor) -> Tensor:
        """Expand values per unit, (K, units), to the dimensions of every query head, (N, H)."""
        dims = values.repeat_interleave(self.step, 1)
        return dims.repeat_interleave(self.width // dims.numel(), 0)

    def forward(self, x: Tensor, after: Tensor | None = None, for_queries: bool = False) -> Tensor:
        """Scale every dimension of the attention output or, with `for_queries`, of the queries."""
        assert after is None, "HeadDims gates no sublayer"
        values = self.values().to(x.dtype).view(self.groups, -1)
        if not for_queries or not self.order:
            return self._scale(x, self._widen(values).flatten())
        sorted_first = self._widen(values.sort(-1, descending=True).values)
        order = torch.tensor(self.order, device=x.device).argsort()
        return self._scale(x, sorted_first[:, order].flatten())


class HiddenWidth(HardConcrete):
    """Gate on the hidden dimensions of the whole model, applied at every layer that writes them.

    Called without an argument, the module returns the gate values, which norms use.

    Shape:
        x: (..., D) -> same; returns (D,) without x
    """

    def forward(  # type: ignore[override]
        self, x: Tensor | None = None, after: Tensor | None = None
    ) -> Tensor:
        """Scale hidden states by the gates, or return the gates' values if `x` is None."""
        assert after is None, "HiddenWidth gates no sublayer"
        return self.values() if x is None else x * self.values().to(x.dtype)
