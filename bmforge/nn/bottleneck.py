"""Bottleneck adapters: down-projection, activation, up-projection.

An adapter adds ``scale * up(act(down(h)))`` to the output of a module. h is the module's output (an
adapter), its input (a parallel adapter), or the input of another module. The two matrices have one
of three forms: dense ("plain"), a product of two thin matrices, or a sum of Kronecker products.

Source: Houlsby et al., "Parameter-efficient transfer learning for NLP" (2019); He et al., "Towards
a unified view of parameter-efficient transfer learning" (2022), for the parallel form; Karimi
Mahabadi et al., "Compacter" (2021), for the sums of Kronecker products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.adapter_selection import adapter_choice_of, weight_of
from bmforge.nn.channel import out_width
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.mlp import get_activation
from bmforge.nn.part import AdapterModule, TensorNote, find_like

__all__ = ["Bottleneck", "BottleneckOptions", "BottleneckInput", "build_bottleneck"]


@dataclass(frozen=True)
class BottleneckOptions:
    """Options of the adapter kind "bottleneck".

    Args:
        width: number W of bottleneck features; used if `reduction` is 0.
        reduction: ratio of input features to bottleneck features; replaces `width` if above 0.
        form: form of the two matrices: "plain", "low_rank" or "kronecker".
        rank: rank of a low-rank matrix, or of the right factor of a Kronecker product (0: full
            rank).
        division: number n of summed Kronecker products, whose left factors are (n, n).
        shared_rule: use the same left factors in both matrices.
        activation: "relu", "gelu", "gelu_tanh", "silu", "tanh", or another name that
            transformers uses.
        reads: input of the adapter: "out", the module's output, or "in", the module's input.
        scale: factor on the added term.
        reads_at: dict from the name of an adapted module to the name of the module whose input
            the adapter reads.
    """

    width: int = 24
    reduction: int = 0
    form: Literal["plain", "low_rank", "kronecker"] = "plain"
    rank: int = 1
    division: int = 4
    shared_rule: bool = False
    activation: str = "gelu_new"
    reads: Literal["out", "in"] = "out"
    scale: float = 1.0
    reads_at: dict[str, str] = field(default_factory=dict)

    def of(self, name: str, ins: int, outs: int) -> BottleneckOptions:
        """Return the resolved options of one module's bottleneck, from `ins` to `outs` features.

        Raises:
            ConfigError: the options do not fit these sizes.
        """
        if self.reduction < 0:
            raise ConfigError(f"reduction={self.reduction} must be at least 0.")
        own = self
        if self.reduction:
            own = replace(self, width=max(ins // self.reduction, 1), reduction=0)
        own._check(name, ins, outs)
        return own

    def _check(self, name: str, ins: int, outs: int) -> None:
        get_activation(self.activation)
        forms = ("plain", "low_rank", "kronecker")
        if self.form not in forms or self.reads not in ("out", "in"):
            raise ConfigError(
                f"form={self.form!r} must be one of {', '.join(forms)}, and reads={self.reads!r} "
                "must be 'out' or 'in'."
            )
        if self.width < 1:
            raise ConfigError(f"width={self.width} must be at least 1.")
        if not math.isfinite(self.scale) or self.scale == 0:
            raise ConfigError(f"scale={self.scale} must be finite and not 0.")
        smallest = min(self.width, ins, outs)
        if self.form == "low_rank" and not 1 <= self.rank <= smallest:
            raise ConfigError(
                f"rank={self.rank} is out of range for the bottleneck of {name} (allowed: 1 to "
                f"{smallest}, its smallest size)."
            )
        if self.form == "kronecker":
            for what, size in (("input", ins), ("output", outs), ("bottleneck", self.width)):
                if size % self.division:
                    raise ConfigError(
                        f"division={self.division} does not divide the {what} size {size} of "
                        f"{name}. Use a common divisor of all sizes."
                    )
            if not 0 <= self.rank <= smallest // self.division:
                raise ConfigError(
                    f"rank={self.rank} is out of range for the bottleneck of {name} (allowed: 1 to "
                    f"{smallest // self.division}, or 0 for full rank)."
                )


Notes = dict[str, tuple[tuple[int, ...], float | str]]


def _matrix_notes(options: BottleneckOptions, stem: str, ins: int, outs: int) -> Notes:
    """Return a dict from a matrix's tensor names to (shape, initialization); `up` is zero."""
    last: float | str = 0.01 if stem == "down" else "zeros"
    bias: Notes = {f"{stem}_bias": ((outs,), "zeros")}
    if options.form == "plain":
        return {f"{stem}_weight": ((outs, ins), last), **bias}
    rank, n = options.rank, options.division
    if options.form == "low_rank":
        first = math.sqrt(2 / (ins + rank))
        last = math.sqrt(2 / (rank + outs)) if stem == "down" else last
        return {f"{stem}_left": ((ins, rank), first), f"{stem}_right": ((rank, outs), last), **bias}
    notes: Notes = {}
    if stem == "down" or not options.shared_rule:
        notes[f"{stem}_rule"] = ((n, n, n), 0.01)
    spread = math.sqrt(2 * n / (ins + outs))
    last = spread if stem == "down" else "zeros"
    if rank == 0:
        return {**notes, f"{stem}_whole": ((n, ins // n, outs // n), last), **bias}
    return {
        **notes,
        f"{stem}_left": ((n, ins // n, rank), spread),
        f"{stem}_right": ((n, rank, outs // n), last),
        **bias,
    }


class Bottleneck(AdapterModule):
    """Bottleneck adapter: ``out + scale * up(act(down(h)))``.

    Args:
        ins: number of features of h.
        outs: number of features of the module's output.
        options: see `BottleneckOptions`.
        like: tensor with the dtype and device to use.
        reader: `BottleneckInput` that stores h if h is the input of another module.

    Shape:
        h: (..., ins) -> (..., outs)
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset({"", "part"})

    def __init__(
        self,
        ins: int,
        outs: int,
        options: BottleneckOptions,
        like: Tensor,
        reader: BottleneckInput | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        # In a tuple: the reader is a child of the module that it reads, not of this one.
        self.reader = (reader,)
        self.activation = get_activation(options.activation)
        self.shapes = {
            **_matrix_notes(options, "down", ins, options.width),
            **_matrix_notes(options, "up", options.width, outs),
        }
        for key, (shape, _) in self.shapes.items():
            tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
            self.register_parameter(key, nn.Parameter(tensor))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the tensors' initialization; all tensors are replicated."""
        return {key: TensorNote(initial) for key, (_, initial) in self.shapes.items()}

    def forward(self, h: Tensor) -> Tensor:
        """Return the adapter's output, which is added to the module's output."""
        inner = self.activation(self._times(h.to(self.up_bias.dtype), "down"))
        added = self._times(inner, "up")
        return added if self.options.scale == 1 else added * self.options.scale

    def _times(self, x: Tensor, stem: str) -> Tensor:
        bias = getattr(self, f"{stem}_bias")
        if self.options.form == "plain":
            return F.linear(x, getattr(self, f"{stem}_weight"), bias)
        if self.options.form == "low_rank":
            low = x @ getattr(self, f"{stem}_left")
            return low @ getattr(self, f"{stem}_right") + bias
        return x @ self._kronecker(stem) + bias

    def _kronecker(self, stem: str) -> Tensor:
        """Return one weight matrix (in, out), a sum of Kronecker products."""
        rule = getattr(self, "down_rule" if self.options.shared_rule else f"{stem}_rule")
        if self.options.rank:
            right = getattr(self, f"{stem}_left") @ getattr(self, f"{stem}_right")
        else:
            right = getattr(self, f"{stem}_whole")
        summed = torch.einsum("nab,ncd->acbd", rule, right)
        return summed.flatten(2).flatten(0, 1)

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Add the adapter's output to the module's output."""
        (reader,) = self.reader
        if reader is not None:
            samples = adapter_choice_of(self).samples
            h = reader.take() if samples is None else reader.take()[samples]
        else:
            h = out if self.options.reads == "out" else inputs[0]
        return out + self(h).to(out.dtype)

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        o = self.options
        return f"width={o.width}, form={o.form}, reads={o.reads}, scale={o.scale}"


class BottleneckInput(AdapterModule):
    """Stores the input of a module until the parallel adapter of a later module reads it."""

    sharding_styles: ClassVar[frozenset[str]] = frozenset(
        {"", "part", "column", "key_value", "row"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return an empty dictionary: the module has no tensors."""
        return {}

    def join_to(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Store the module's input for the adapter, unless the adapter is disabled in this call."""
        self.held[:] = [inputs[0]] if weight_of(self) else []
        return out

    def take(self) -> Tensor:
        """Return the stored input and release it.

        Raises:
            ConfigError: the module to which the reader is attached has not run yet.
        """
        if not self.held:
            raise ConfigError(
                "the adapter needs the input of a module that runs only after the target of "
                "the adapter. Choose a target that runs after that module."
            )
        return self.held.pop()

    def __deepcopy__(self, memo: dict[int, Any]) -> BottleneckInput:
        """Return a copy without the stored input."""
        copied = memo[id(self)] = BottleneckInput()
        copied.is_delta, copied.adapter_weight = self.is_delta, self.adapter_weight
        copied.training = self.training
        return copied


def build_bottleneck(name: str, module: nn.Module, options: BottleneckOptions) -> Bottleneck:
    """Build the bottleneck adapter of a module; it is neither attached nor initialized.

    Raises:
        ConfigError: the width of the module is unknown, or the options do not fit it.
    """
    outs = out_width(name, module)
    ins = outs if options.reads == "out" else in_width(name, module)
    return Bottleneck(ins, outs, options.of(name, ins, outs), find_like(module))


def in_width(name: str, module: nn.Module) -> int:
    """Return the number of input features of a module or of its first linear layer."""
    sizes = linear_sizes(module)
    if sizes is not None:
        return sizes[0]
    linear = [s for child in module.modules() if (s := linear_sizes(child)) is not None]
    return linear[0][0] if linear else out_width(name, module)
