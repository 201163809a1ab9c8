"""Statistics of parameters, gradients and activations that are independent of the layout.

Every process measures its shards in float64, five numbers per tensor. Two all-reduces combine them:
the first for the extremes, the second for sums relative to the extremes' midpoint, so that a large
mean does not reduce the accuracy of a small deviation. `format_table` formats the rows as text.

Source: BMTrain's `inspect`, which gathers whole tensors; in this module a process reads only its
shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from bmforge.errors import ConfigError, DistributedError, suggest
from bmforge.parallel import (
    CONTEXT_AXES,
    STAGE_AXES,
    TENSOR_AXES,
    axis_rank,
    axis_size,
    counts_here,
    gradient_ranks,
    mesh_of,
    pipeline_of,
    reshard_,
)
from bmforge.parallel.layout import axis_group
from bmforge.shards import is_first_replica, local_tensor
from bmforge.surgery import match_glob

__all__ = ["ActivationRecorder", "format_table", "inspect_activations", "inspect_parameters"]

Row: TypeAlias = dict[str, Any]
Shapes: TypeAlias = dict[str, tuple[int, ...]]
_CHUNK = 1 << 22  # elements converted to float64 at a time
_COLUMNS = ("max", "min", "std", "mean", "grad_std", "grad_mean")


def inspect_parameters(model: nn.Module, globs: Iterable[str] | str = ("**",)) -> list[Row]:
    """Return statistics of parameters and of their current gradients.

    Call it on every process, between backward and `zero_grad` if gradients are wanted.

    Args:
        model: model, parallelized or not.
        globs: name globs of parameters; see `surgery`.

    Returns:
        one row per parameter of the whole model, in the order of names, the same on every process:
        ``name shape mean std max min grad_mean grad_std``. `std` is as in torch (NaN for one
        element); gradient columns are None without a gradient.

    Raises:
        ConfigError: a glob matches no parameter of any process.

    Memory: a few float64 buffers of 32 MiB. Comm: two all-reduces of a few numbers per parameter;
    in a pipeline, the names are gathered.
    """
    reshard_(model)
    mesh, pipeline = mesh_of(model), pipeline_of(model)
    own: dict[str, Tensor] = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
    if pipeline is not None:
        shapes = _join(shapes, pipeline.group)
    names = _select(shapes, globs, "parameter")
    leads = counts_here(mesh, *STAGE_AXES)
    for name in () if pipeline is None else pipeline.copied:
        own.pop(name)
    parts = []
    for name in names:
        parameter = own.get(name)
        gradient = None if parameter is None else parameter.grad
        parts += [_measure_once(parameter, leads), _measure_once(gradient, leads)]
    return _make_rows(names, shapes, _combine(parts, mesh))


def inspect_activations(model: nn.Module, globs: Iterable[str] | str) -> ActivationRecorder:
    """Context manager that records statistics of modules' outputs and of their gradients.

        with inspect_activations(model, ("layers.*",)) as seen:
            run_step(model, run, batches)
        print(format_table(seen.rows()))

    Args:
        model: model, parallelized or not.
        globs: name globs of modules inside the model; see `surgery`.

    Raises:
        ConfigError: a glob matches no module of any process.
    """
    return ActivationRecorder(model, globs)


class ActivationRecorder:
    """Accumulates statistics of modules' floating-point outputs; see `inspect_activations`.

    All calls are included, so the micro-batches of a step are combined; recomputation in the
    backward pass is excluded. Modules inside a compiled block are not recorded.
    """

    def __init__(self, model: nn.Module, globs: Iterable[str] | str) -> None:
        self._mesh = mesh_of(model)
        own = {name: module for name, module in model.named_modules() if name}
        pipeline = pipeline_of(model)
        shapes: Shapes = dict.fromkeys(own, ())
        if pipeline is not None:
            shapes = _join(shapes, pipeline.group)
        self._modules = {n: own[n] for n in _select(shapes, globs, "module") if n in own}
        self._values: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._shapes: Shapes = {}
        self._handles: list[RemovableHandle] = []
        self._tracker = ModuleTracker()

    def __enter__(self) -> ActivationRecorder:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(partial(self._note, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _note(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if self._tracker.is_bw:  # recomputation: the outputs were already counted
            return
        for key, tensor in _find_tensors(name, out):
            self._shapes[key] = tuple(tensor.shape)
            _add(self._values, key, tensor)
            if tensor.requires_grad:
                self._note_gradient(key, tensor)

    def _note_gradient(self, key: str, tensor: Tensor) -> None:
        def note(gradient: Tensor) -> None:
            handle.remove()  # a pipeline that splits the backward pass calls the hook twice
            _add(self._gradients, key, gradient)

        handle = tensor.register_hook(note)

    def rows(self) -> list[Row]:
        """Return one row per tensor that a module returned, combined over all processes.

        The columns are those of `inspect_parameters`; `shape` is that of the last call on the first
        process that has the tensor. Gradients are means over processes with different tokens, as
        for parameters. Values that are replicated over tensor- or context-parallel processes count
        once; with context parallelism a replicated value has no gradient statistics, as each
        process has only a partial gradient. An output that is a tuple or dict has one row per
        tensor, such as ``layers.0[1]``.

        Comm: call it on every process; names are gathered, then two all-reduces, and an all-gather
            over `tp` and over `cp`.
        """
        shapes = self._shapes
        if self._mesh is not None and self._mesh.size() > 1:
            shapes = _join(shapes, dist.group.WORLD)
        names = sorted(shapes, key=_name_order)
        parts = []
        for name in names:
            parts += [self._values.get(name), self._gradients.get(name)]
        columns = _combine(_drop_copies(parts, self._mesh), self._mesh)
        return _make_rows(names, shapes, columns, 1.0 / gradient_ranks(self._mesh))


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as aligned text with a header line."""
    head = ["name", "shape", *_COLUMNS]
    cells = [head]
    for row in rows:
        numbers = ("-" if row[c] is None else f"{row[c]:.4g}" for c in _COLUMNS)
        cells.append([row["name"], "x".join(map(str, row["shape"])) or "scalar", *numbers])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        texts = [c.ljust(w) for c, w in zip(line[:2], widths[:2], strict=True)]
        texts += [c.rjust(w) for c, w in zip(line[2:], widths[2:], strict=True)]
        lines.append("  ".join(texts))
    return "\n".join(lines)


def _name_order(name: str) -> list[str]:
    """Return a sort key that orders layers.9 before layers.10."""
    return [part.zfill(9) if part.isdigit() else part for part in name.split(".")]


def _select(names: Iterable[str], globs: Iterable[str] | str, what: str) -> list[str]:
    """Return the names that match a glob, in order; raise an error for a glob without a match."""
    names, globs = list(names), (globs,) if isinstance(globs, str) else tuple(globs)
    for glob in globs:
        if not any(match_glob(name, glob) for name in names):
            raise ConfigError(
                f"{what} pattern {glob!r} matches nothing.{suggest(glob, names)} Use names of this "
                "model."
            )
    return sorted((n for n in names if any(match_glob(n, g) for g in globs)), key=_name_order)


def _join(own: Shapes, group: Any) -> Shapes:
    """Merge the tensor shapes of all processes; a repeated name has the lowest rank's shape."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return {name: shape for part in reversed(everyone) for name, shape in part.items()}


def _find_tensors(name: str, out: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a module's output, each with a name."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield name, out
    elif isinstance(out, Mapping):
        for key, value in out.items():
            yield from _find_tensors(f"{name}[{key}]", value)
    elif isinstance(out, tuple | list):
        for key, value in zip(getattr(out, "_fields", range(len(out))), out, strict=True):
            yield from _find_tensors(f"{name}[{key}]", value)


def _measure_once(tensor: Tensor | None, leads: bool) -> Tensor | None:
    """Return the statistics of a tensor's local shard; None if another process counts the shard."""
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        raise DistributedError(
            f"a gradient has placements={tensor.placements}, so it has not been reduced. Finish "
            "the backward pass of the step before inspecting."
        )
    if tensor is None or not is_first_replica(tensor, leads):
        return None
    return _measure(tensor)


def _measure(tensor: Tensor) -> Tensor:
    """Return count, mean, sum of squared deviations, max and min of the local elements.

    Shape:
        tensor: any -> (5,) of float64
    """
    local = local_tensor(tensor.detach())
    total = _empty_statistics(local.device)
    if local.numel() > 0:
        for chunk in local.reshape(-1).split(_CHUNK):
            wide = chunk.double()
            mean = wide.mean()
            squares = (wide - mean).square().sum()
            count = wide.new_tensor(wide.numel())
            total = _merge(total, torch.stack((count, mean, squares, wide.max(), wide.min())))
    return total


def _empty_statistics(device: torch.device | str) -> Tensor:
    """Return the statistics of an empty tensor."""
    ends = (-float("inf"), float("inf"))
    return torch.tensor((0.0, 0.0, 0.0, *ends), dtype=torch.float64, device=device)


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Combine the statistics of two sets of elements (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    share, off = b[0] / count.clamp(min=1.0), b[1] - a[1]
    squares = a[2] + b[2] + off.square() * a[0] * share
    high, low = torch.maximum(a[3], b[3]), torch.minimum(a[4], b[4])
    return torch.stack((count, a[1] + off * share, squares, high, low))


@torch.no_grad()
def _add(measures: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    new = _measure(tensor)
    measures[name] = _merge(measures[name], new) if name in measures else new


def _stack(parts: Sequence[Tensor | None], mesh: DeviceMesh | None) -> Tensor:
    """Stack statistics to one (N, 5) tensor on the device of the collectives."""
    device = torch.device("cpu" if mesh is None else mesh.device_type)
    nothing = _empty_statistics(device)
    return torch.stack([nothing if part is None else part.to(device) for part in parts])


def _drop_copies(parts: Sequence[Tensor | None], mesh: DeviceMesh | None) -> list[Tensor | None]:
    """Replace the statistics of replicated tensors with None, except on the first process.

    Outputs do not tell whether they are replicated or sharded, so the statistics are compared:
    those of replicas are bit-identical, those of shards are not.

    Args:
        parts: statistics of the value and of the gradient of each output, alternating.
        mesh: mesh of the model.
    """
    parts = list(parts)
    for axis in (*CONTEXT_AXES, *TENSOR_AXES):
        if not parts or mesh is None or axis_size(mesh, axis) == 1:
            continue
        own = _stack(parts, mesh)
        everyone = [torch.empty_like(own) for _ in range(axis_size(mesh, axis))]
        dist.all_gather(everyone, own, group=axis_group(mesh, axis))
        equal = torch.stack([other == own for other in everyone]).all(dim=0).all(dim=1).tolist()
        if axis in CONTEXT_AXES:
            # Each replica has only the partial gradient of its process's tokens.
            for index, is_copy in enumerate(equal[::2]):
                parts[2 * index + 1] = None if is_copy else parts[2 * index + 1]
        if axis_rank(mesh, axis) > 0:
            parts = [None if e else part for part, e in zip(parts, equal, strict=True)]
    return parts


def _combine(parts: Sequence[Tensor | None], mesh: DeviceMesh | None) -> list[list[float] | None]:
    """Return mean, std, max and min over all processes; None if there are no elements."""
    if not parts:
        return []
    count, mean, squares, high, low = _stack(parts, mesh).unbind(1)
    ends = torch.stack((high, -low))
    _all_reduce_(ends, dist.ReduceOp.MAX, mesh)
    middle = (ends[0] - ends[1]) / 2
    middle = middle.where(middle.isfinite(), 0.0)
    off = mean - middle
    sums = torch.stack((count, count * off, squares + count * off.square(), high.isnan().double()))
    _all_reduce_(sums, dist.ReduceOp.SUM, mesh)
    total, shifted, square, nans = sums
    variance = (square - shifted.square() / total) / (total - 1.0)
    # Backends differ in the maximum of NaN; in torch it is NaN.
    ends = ends.where(nans == 0.0, float("nan"))
    columns = (middle + shifted / total, variance.clamp(min=0.0).sqrt(), ends[0], -ends[1])
    table = torch.stack(columns, dim=1).tolist()
    return [row if n > 0 else None for row, n in zip(table, total.tolist(), strict=True)]


def _all_reduce_(values: Tensor, how: Any, mesh: DeviceMesh | None) -> None:
    if mesh is not None and mesh.size() > 1:
        dist.all_reduce(values, how)


def _make_rows(
    names: Sequence[str],
    shapes: Shapes,
    columns: Sequence[list[float] | None],
    gradient_scale: float = 1.0,
) -> list[Row]:
    """Return one row per name with the statistics of its value and gradient."""
    rows = []
    for name, value, gradient in zip(names, columns[::2], columns[1::2], strict=True):
        missing: list[Any] = [None] * 4
        mean, std, high, low = value or missing
        row: Row = {"name": name, "shape": shapes[name], "mean": mean, "std": std}
        row |= {"max": high, "min": low, "grad_mean": None, "grad_std": None}
        if gradient is not None:
            row["grad_mean"], row["grad_std"] = (gradient_scale * x for x in gradient[:2])
        rows.append(row)
    return rows
