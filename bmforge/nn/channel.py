"""Per-channel adapters: an added bias (BitFit) and a factor (IA3).

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
from bmforge.nn.part import AdapterModule, TensorNote, find_like

__all__ = [
    "ScaleAdapter",
    "ScaleOptions",
    "BiasAdapter",
    "build_scale_adapter",
    "build_bias_adapter",
]

_ENDS = {"column": 0, "key_value": 0, "head": 0}


class BiasAdapter(AdapterModule):
    """Bias adapter (BitFit): a trained bias added to the output of a module, initially zero.

    Args:
        width: number C of channels.
        like: tensor with the dtype and device to use.

    Shape:
        returns (C,)
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset(
        {"", "column", "key_value", "head", "part", "head_norm"}
    )

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width, dtype=like.dtype, device=like.device))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization (zeros) and sharding (by output channel) of the bias."""
        return {"bias": TensorNote("zeros", _ENDS)}

    def forward(self) -> Tensor:
        """Return the bias of this rank's channels."""
        return self.bias

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Add the bias to the module's output."""
        return out + self().to(out.dtype)


class ScaleAdapter(AdapterModule):
    """IA3 adapter: a trained factor per channel of a module's input or output, initially one.

    Args:
        width: number C of channels.
        into: scale the module's input; False scales its output.
        like: tensor with the dtype and device to use.

    Shape:
        returns (C,)
    """

    def __init__(self, width: int, into: bool, like: Tensor) -> None:
        super().__init__()
        self.on_input = into  # type: ignore[misc]
        self.sharding_styles = frozenset(  # type: ignore[misc]
            {"", "row", "column", "key_value"} if into else {"", "column", "key_value", "part"}
        )
        self.weight = nn.Parameter(torch.empty(width, dtype=like.dtype, device=like.device))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization (ones) and sharding (by channel) of the factors."""
        return {"weight": TensorNote("ones", {"row": 0} if self.on_input else _ENDS)}

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` times the factors."""
        return (x * self.weight.to(x.dtype)).to(x.dtype)

    def change_input(self, x: Tensor) -> Tensor:
        """Scale the module's input."""
        return self(x)

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Scale the module's output, unless the input is scaled."""
        return out if self.on_input else self(out)


@dataclass(frozen=True)
class ScaleOptions:
    """Options of the adapter kind "gain" (IA3).

    Args:
        into: name suffixes of the layers whose input is scaled; other layers' output is scaled.
    """

    into: tuple[str, ...] = ()


def build_scale_adapter(name: str, module: nn.Module, options: ScaleOptions) -> ScaleAdapter:
    """Build the IA3 factors of a linear layer; they are neither attached nor initialized.

    Raises:
        ConfigError: the module is not a linear layer.
    """
    sizes = linear_sizes(module)
    if sizes is None or getattr(module, "applies_adapters", False):
        raise ConfigError(
            f"IA3 supports only linear layers of a block, but {name} is a "
            f"{type(module).__name__}. Choose other targets."
        )
    into = any(f".{name}".endswith(f".{ending}") for ending in options.into)
    return ScaleAdapter(sizes[0] if into else sizes[1], into, find_like(module))


def build_bias_adapter(name: str, module: nn.Module, options: Any) -> BiasAdapter:
    """Build a bias adapter for a module of known output width.

    Raises:
        ConfigError: the output width of the module is unknown.
    """
    return BiasAdapter(out_width(name, module), find_like(module))


def out_width(name: str, module: Any) -> int:
    """Return the number of output channels of a module.

    Supported modules are linear layers, norms, embeddings, and (by their last projection) attention
    layers and MLPs.

    Raises:
        ConfigError: the module is of a different kind.
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
        f"the output size of {name}, a {type(module).__name__}, is unknown. Choose a linear layer, "
        "a norm, an attention or an MLP as target."
    )


def _find(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
