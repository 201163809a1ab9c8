"""Parts that change each channel by a number of its own: an added bias, a factor.

Source: Ben Zaken et al., "BitFit" (2021); Liu et al., "Few-shot parameter-efficient fine-tuning is
better and cheaper than in-context learning" (2022), for the factors, (IA)^3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.part import BesidePart, TensorNote, find_like

__all__ = ["Gain", "GainOptions", "Shift", "build_gain", "build_shift"]

_ENDS = {"column": 0, "key_value": 0, "head": 0}


class Shift(BesidePart):
    """A bias that is added to what a module makes; it starts at zero.

    Args:
        width: C, how many channels.
        like: gives dtype and device.

    Shape:
        returns (C,)
    """

    cut_styles: ClassVar[frozenset[str]] = frozenset(
        {"", "column", "key_value", "head", "part", "head_norm"}
    )

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width, dtype=like.dtype, device=like.device))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Channels are cut as the module's."""
        return {"bias": TensorNote("zeros", _ENDS)}

    def forward(self) -> Tensor:
        """Return the bias of the channels that are here."""
        return self.bias

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Add it."""
        return out + self().to(out.dtype)


class Gain(BesidePart):
    """A factor on every channel of what goes into a module or comes out of it; it starts at one.

    Args:
        width: C.
        into: of what goes in.
        like: gives dtype and device.

    Shape:
        returns (C,)
    """

    def __init__(self, width: int, into: bool, like: Tensor) -> None:
        super().__init__()
        self.enters = into  # type: ignore[misc]
        self.cut_styles = frozenset(  # type: ignore[misc]
            {"", "row", "column", "key_value"} if into else {"", "column", "key_value", "part"}
        )
        self.weight = nn.Parameter(torch.empty(width, dtype=like.dtype, device=like.device))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Channels are cut as the module's own."""
        return {"weight": TensorNote("ones", {"row": 0} if self.enters else _ENDS)}

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the factors."""
        return (x * self.weight.to(x.dtype)).to(x.dtype)

    def enter(self, x: Tensor) -> Tensor:
        """Multiply what goes in."""
        return self(x)

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Multiply what comes out."""
        return out if self.enters else self(out)


@dataclass(frozen=True)
class GainOptions:
    """Options of "gain".

    Args:
        into: endings of names of layers: the factors are on what goes into these, not on what
            comes out.
    """

    into: tuple[str, ...] = ()


def build_gain(name: str, module: nn.Module, options: GainOptions) -> Gain:
    """Return a part for a linear layer; it is neither attached nor drawn.

    Raises:
        ConfigError: no linear layer.
    """
    sizes = linear_sizes(module)
    if sizes is None or getattr(module, "asks_parts", False):
        raise ConfigError(
            f"factors stand beside a linear layer of a block; {name} is a {type(module).__name__}."
        )
    into = any(f".{name}".endswith(f".{ending}") for ending in options.into)
    return Gain(sizes[0] if into else sizes[1], into, find_like(module))


def build_shift(name: str, module: nn.Module, options: Any) -> Shift:
    """Return a bias for a module whose number of channels is known.

    Raises:
        ConfigError: a module that does not say how wide its output is.
    """
    return Shift(out_width(name, module), find_like(module))


def out_width(name: str, module: Any) -> int:
    """Return how many channels come out of a module.

    Known are linear layers, norms, embeddings, and attentions and MLPs by their last projection.

    Raises:
        ConfigError: any other.
    """
    sizes = linear_sizes(module)
    if sizes is not None:
        return sizes[1]
    for last in ("o_proj", "down_proj", "experts.down_proj"):
        found = _find(module, last)
        if isinstance(found, Tensor):
            return int(found.shape[1])
        if found is not None:
            return out_width(f"{name}.{last}", found)
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return int(weight.shape[0])
    linear = [s for one in module.modules() if (s := linear_sizes(one)) is not None]
    if linear:
        return linear[-1][1]
    raise ConfigError(
        f"{name} is a {type(module).__name__}, which does not say how wide its output is: name a "
        "linear layer, a norm, an attention or an MLP."
    )


def _find(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
