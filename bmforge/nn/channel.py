"""Per-channel parts: an added bias (BitFit), and a factor (IA3).

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
    """A bias added to the output of a module; it starts at zero.

    Args:
        width: C, number of channels.
        like: tensor with the dtype and device to use.

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
        """Return the notes: channels are sharded as the module's."""
        return {"bias": TensorNote("zeros", _ENDS)}

    def forward(self) -> Tensor:
        """Return the bias of the local channels."""
        return self.bias

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Add the bias to the output."""
        return out + self().to(out.dtype)


class Gain(BesidePart):
    """A factor on every channel of a module's input or output; it starts at one.

    Args:
        width: C.
        into: True for the input, False for the output.
        like: tensor with the dtype and device to use.

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
        """Return the notes: channels are sharded as the module's."""
        return {"weight": TensorNote("ones", {"row": 0} if self.enters else _ENDS)}

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the factors."""
        return (x * self.weight.to(x.dtype)).to(x.dtype)

    def enter(self, x: Tensor) -> Tensor:
        """Scale the input."""
        return self(x)

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Scale the output."""
        return out if self.enters else self(out)


@dataclass(frozen=True)
class GainOptions:
    """Options of "gain".

    Args:
        into: endings of layer names whose input is scaled instead of the output.
    """

    into: tuple[str, ...] = ()


def build_gain(name: str, module: nn.Module, options: GainOptions) -> Gain:
    """Return a part for a linear layer; it is neither attached nor initialized.

    Raises:
        ConfigError: not a linear layer.
    """
    sizes = linear_sizes(module)
    if sizes is None or getattr(module, "asks_parts", False):
        raise ConfigError(
            f"scales apply to linear layers of a block; {name} is a "
            f"{type(module).__name__}. Give other targets."
        )
    into = any(f".{name}".endswith(f".{ending}") for ending in options.into)
    return Gain(sizes[0] if into else sizes[1], into, find_like(module))


def build_shift(name: str, module: nn.Module, options: Any) -> Shift:
    """Return a bias for a module of known output width.

    Raises:
        ConfigError: a module of unknown output width.
    """
    return Shift(out_width(name, module), find_like(module))


def out_width(name: str, module: Any) -> int:
    """Return the number of output channels of a module.

    Supported are linear layers, norms, embeddings, and attentions and MLPs by their last
    projection.

    Raises:
        ConfigError: any other module.
    """
    sizes = linear_sizes(module)
    if sizes is not None:
        return sizes[1]
    for last in ("o_proj", "down_proj", "experts.down_proj"):
        last_part = _find(module, last)
        if isinstance(last_part, Tensor):
            return int(last_part.shape[1])
        if last_part is not None:
            return out_width(f"{name}.{last}", last_part)
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return int(weight.shape[0])
    linear = [s for child in module.modules() if (s := linear_sizes(child)) is not None]
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
