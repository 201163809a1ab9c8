"""Parallelizes the model of a CPM-Pretrain program, including models with `mpu` layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.parallel import Layout, parallelize
from bmforge.parallel.tensor.parts import view_here
from bmforge.parallel.zero import apply_zero_
from bmforge.records import record_of
from bmforge.surgery import wrap_forward_

__all__ = ["lay_out_"]


def lay_out_(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: str, recompute: bool
) -> nn.Module:
    """Parallelize the model of a program over a mesh, in place.

    Layers of `mpu` are tensor parallel already: their local parts become shards of full parameters,
    which are gathered over the replicas when the model is called.

    Args:
        model: model, built in the same way on every process.
        layout: layout of the mesh.
        mesh: mesh of all axes, which `mpu` uses too.
        precision: see `parallelize`.
        recompute: True to recompute blocks in backward.

    Raises:
        ConfigError: the layout is invalid (see `parallelize`), or `mpu` layers are in a pipeline.
    """
    parts = [p for p in model.parameters() if getattr(p, "model_parallel", False)]
    if layout.tp == 1 or not parts:
        return parallelize(model, layout, mesh=mesh, precision=precision, recompute=recompute)
    if layout.pp > 1 or recompute:
        raise ConfigError(
            f"{type(model).__name__} has mpu layers, which with --model-parallel-size "
            f"{layout.tp} support neither a pipeline nor --checkpoint-activations. Use "
            "mpu.checkpoint for recomputation, or replace the mpu layers by ordinary layers, "
            "which bmforge shards (examples/own_model_pipeline.py)."
        )
    _hold_parts_(model, mesh["tp"])
    dtype = None if precision == "fp32" else parse_dtype(precision)
    if mesh.size() > layout.tp or dtype is not None:
        apply_zero_(model, (), mesh, zero=layout.zero, dtype=dtype)
    record = record_of(model)
    record.mesh, record.layout, record.units, record.precision = mesh, layout, (), precision
    return model


def _hold_parts_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace local parameters with sharded parameters of the full shape, in place.

    Optimizers, clipping, ZeRO and checkpoints then see the sharding, while forward sees local
    tensors, also where a program reads a parameter outside its layer.
    """
    new: dict[int, nn.Parameter] = {}
    places = []
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False):
            if id(param) not in new:
                new[id(param)] = _as_whole(param, mesh)
            places.append((module, key, new[id(param)]))
    for module, key, param in places:
        module._parameters[key] = param
    wrap_forward_(model, partial(_on_parts, [entry[:2] for entry in places]), "views")


def _as_whole(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    is_part = getattr(param, "model_parallel", False)
    placement = Shard(param.partition_dim) if is_part else Replicate()  # type: ignore[attr-defined]
    distributed = DTensor.from_local(param.detach(), mesh, [placement], run_check=False)
    return nn.Parameter(distributed, requires_grad=param.requires_grad)


def _on_parts(
    places: list[tuple[nn.Module, str]], inner: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Forward wrapper: call a model with its sharded parameters replaced by local tensors."""
    originals = [module._parameters[key] for module, key in places]
    views = {id(param): view_here(param) for param in originals if param is not None}
    try:
        for (module, key), param in zip(places, originals, strict=True):
            module._parameters[key] = views.get(id(param))  # type: ignore[assignment]
        return inner(*args, **kwargs)
    finally:
        for (module, key), param in zip(places, originals, strict=True):
            module._parameters[key] = param
