"""DeepSpeed's `PipelineModule`: a model built from a list of layers, split by the engine.

Each layer is called with the previous layer's output, a tensor or a tuple. Any tensors may be sent
between stages, with or without gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.models.rules import LayoutRules

__all__ = [
    "LayerSpec", "PipeModelDataParallelTopology", "PipelineModule", "ProcessCoord", "StageOutput",
    "TiedLayerSpec",
]  # fmt: skip


class LayerSpec:
    """Description of a layer that is built later.

    Args:
        typename: class of the layer.
        module_args, module_kwargs: arguments of its constructor.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"LayerSpec: typename={typename!r} must be a subclass of nn.Module.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        """Return the class name."""
        return f"{type(self).__name__}({self.typename.__name__})"

    def build(self) -> nn.Module:
        """Build the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Description of a layer that is used in several positions, such as a tied embedding.

    Args:
        key: positions with the same key share one layer, which is built at the first.
        typename: class of the layer.
        module_args, module_kwargs: arguments of its constructor.
        forward_fn: function of (layer, input) to call at this position instead of the layer.
        tied_weight_attr: accepted and ignored; the whole layer is shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class StageOutput(NamedTuple):
    """Output of a pipeline stage: the result on the last stage, or tensors for the next stage."""

    value: Any = None
    stage_outputs: tuple[Tensor, ...] | None = None


class _Place(nn.Module):
    """Layer that returns ``function(inputs)``; for tied layers ``function(shared, inputs)``."""

    def __init__(self, function: Callable[..., Any], shared: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.shared = function, shared

    def forward(self, inputs: Any) -> Any:
        """Apply the function to the inputs; a shared module is the first argument."""
        return self.function(inputs) if self.shared is None else self.function(self.shared, inputs)


class PipelineModule(nn.Module):
    """Sequence of layers, which `pretrain` and `parallelize` split into pipeline stages.

    Args:
        layers: specs, modules, or functions of the previous layer's output.
        num_stages: accepted and ignored; the layout determines the number of stages.
        topology: accepted and ignored; the layout determines the process groups.
        loss_fn: function of the last layer's output and the labels.
        partition_method: accepted and ignored; stages are balanced by cost.
        activation_checkpoint_interval: above 0, `pretrain` recomputes every layer in backward.

    Attributes:
        layers: dict from index to layer; in a pipeline only the layers of this process's stages.
    """

    stage_inputs: tuple[Tensor, ...] = ()
    loss_fn: Callable[[Any, Any], Tensor] | None

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._tied: dict[str, int] = {}
        self.layers = nn.ModuleDict()
        for number, spec in enumerate(layers):
            self.layers[str(number)] = self._make(spec, number)

    def _make(self, spec: Any, number: int) -> nn.Module:
        if isinstance(spec, TiedLayerSpec):
            return self._make_tied(spec, number)
        if isinstance(spec, LayerSpec):
            return spec.build()
        if isinstance(spec, nn.Module):
            return spec
        if not callable(spec):
            raise ConfigError(
                f"layer {number} is {spec!r} (needed: a LayerSpec, module or function)."
            )
        return _Place(spec)

    def _make_tied(self, spec: TiedLayerSpec, number: int) -> nn.Module:
        first = self._tied.setdefault(spec.key, number)
        is_new = first == number
        module = spec.build() if is_new else self.layers[str(first)].get_submodule("shared")
        return _Place(spec.forward_fn or operator.call, module)

    def layout_rules(self) -> LayoutRules:
        """Return layout rules that allow a stage boundary between any two layers.

        Parameters of shared layers are gathered by the root module.
        """
        shared = {
            id(p) for m in self.layers.values() if isinstance(m, _Place) for p in m.parameters()
        }
        units = tuple(
            f"layers.{key}"
            for key, layer in self.layers.items()
            if any(True for _ in layer.parameters())
            and not any(id(p) in shared for p in layer.parameters())
        )
        return LayoutRules(units, units, (), ("layers",), (), ())

    def forward(self, inputs: Any = None) -> Any:
        """Run the layers; return the last output, or in a pipeline a `StageOutput`.

        Args:
            inputs: input of the first layer.
        """
        span = getattr(self.layers, "span", None)
        first, last, total = span or (0, len(self.layers), len(self.layers))
        value = inputs
        if first:
            value = self.stage_inputs if len(self.stage_inputs) > 1 else self.stage_inputs[0]
        for number in range(first, last):
            value = self.layers[str(number)](value)
        if span is None:
            return value
        return (
            StageOutput(value)
            if last == total
            else StageOutput(None, _to_stage_tensors(value, last))
        )


def _to_stage_tensors(value: Any, number: int) -> tuple[Tensor, ...]:
    """Convert a layer's output to tensors for the next stage.

    Args:
        value: output of the stage's last layer.
        number: index of the next layer, for the error message.
    """
    parts = value if isinstance(value, tuple | list) else (value,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise ShapeError(
            f"layer {number - 1} is the last of a stage and returns "
            f"{[type(part).__name__ for part in parts]}, but only tensors can be sent to the "
            "next stage. Return a tensor or a tuple of tensors."
        )
    return tuple(parts)


class ProcessCoord(NamedTuple):
    """Coordinates of a process: stage, replica and tensor-parallel rank."""

    pipe: int
    data: int
    model: int


class PipeModelDataParallelTopology:
    """Map between ranks and coordinates; stages vary slowest, tensor-parallel ranks fastest.

    Args:
        num_pp: number of stages.
        num_mp: tensor-parallel size.
        num_dp: number of replicas.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        self._ranks = torch.arange(num_pp * num_dp * num_mp).view(num_pp, num_dp, num_mp)

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._ranks.numel()

    def get_axis_names(self) -> tuple[str, ...]:
        """Return the names of the axes, slowest first."""
        return ProcessCoord._fields

    def get_dim(self, axis: str) -> int:
        """Return the length of an axis."""
        return self._ranks.shape[ProcessCoord._fields.index(axis)]

    def get_coord(self, rank: int) -> ProcessCoord:
        """Return the coordinates of a rank."""
        position = (self._ranks == rank).nonzero()[0]
        return ProcessCoord(*position.tolist())

    def get_rank(self, **coord: int) -> int:
        """Return the rank with the given coordinates."""
        return int(self._ranks[ProcessCoord(**coord)])

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along one axis."""
        dim = ProcessCoord._fields.index(axis)
        return self._ranks.movedim(dim, -1).flatten(0, 1).tolist()

    def filter_match(self, **coord: int) -> list[int]:
        """Return all ranks that have the given coordinates on some axes."""
        parameter: Mapping[str, int] = coord
        index = tuple(parameter.get(axis, slice(None)) for axis in ProcessCoord._fields)
        return self._ranks[index].flatten().tolist()
