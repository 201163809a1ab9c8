"""Sharded parameters, and conversion between shards and full tensors.

A shard is a DTensor, sharded by rows over the processes whose gradients are summed. Tensor-parallel
parts of a matrix are separate parameters; `Origin` records the dim along which a matrix was
split.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_share

from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError
from bmforge.parallel.collectives import all_gather, gather_tokens
from bmforge.shards import local_box, local_tensor, shard_like

__all__ = [
    "DistributedParameter", "Origin", "ParameterInitializer", "all_rows", "full_shape", "gather",
    "gather_all", "has_values_", "make_parameter", "mark_", "mesh_of", "need_values", "origin_of",
    "set_values_", "share_like", "whole",
]  # fmt: skip


class ParameterInitializer:
    """Initialization function with fixed arguments, which fills a full parameter."""

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.func, self._args, self._kwargs = func, args, kwargs

    def __call__(self, param: Tensor) -> None:
        """Initialize `param` in place."""
        self.func(param, *self._args, **self._kwargs)


@dataclass(frozen=True)
class Origin:
    """Metadata of a distributed parameter, stored as ``param.origin``.

    Args:
        init_method: function that fills the full parameter.
        group: group name for `grouped_parameters`.
        tp_mode: True if tensor-parallel processes have separate gradients.
        tp_split_dim: dim that tensor parallelism splits; -1 if the parameter is not split.
        in_block: True if a `Block` gathers the parameter together with others.
        stage: pipeline stage that has the parameter; None for all stages.
        is_empty: True if the parameter was created on the meta device and has no values yet.
    """

    init_method: Callable[[Tensor], Any] | None = None
    group: str | None = None
    tp_mode: bool = False
    tp_split_dim: int = -1
    in_block: bool = False
    stage: int | None = None
    is_empty: bool = False

    @property
    def cut(self) -> int:
        """Number of tensor-parallel parts of the parameter."""
        return int(config["tp_size"]) if self.tp_mode and self.tp_split_dim >= 0 else 1


def origin_of(param: Tensor | None) -> Origin | None:
    """Return the metadata of a distributed parameter; None for other tensors."""
    return getattr(param, "origin", None)


class _IsDistributed(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Parameter) and origin_of(instance) is not None


class DistributedParameter(metaclass=_IsDistributed):
    """Parameter that is sharded over the processes; on one process, an ordinary parameter.

    Args:
        data: full values, the same on every process; with `tp_mode` this process's part.
        requires_grad: see torch.nn.Parameter.
        init_method: function that fills the full parameter in `init_parameters`.
        group: see `grouped_parameters`.
        tp_mode: True if the gradients of tensor-parallel processes are not summed, because each
            process has a different part of the parameter, or uses it for different inputs.
        tp_split_dim: dim that is split among these processes; -1 if the parameter is not split.

    Raises:
        DistributedError: init_distributed was not called.
    """

    def __new__(  # type: ignore[misc]
        cls,
        data: Tensor,
        requires_grad: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
    ) -> nn.Parameter:
        """Create an nn.Parameter with an `Origin`."""
        config.need("DistributedParameter")
        origin = Origin(init_method, "tp" if tp_mode else group, tp_mode, tp_split_dim)
        return make_parameter(data, origin, requires_grad)


def mesh_of(origin: Origin) -> Any:
    """Return the mesh over which a parameter is sharded and its gradients are summed."""
    if origin.tp_mode:
        return config.tp_zero
    return config.world if origin.stage is None else config.stage


def make_parameter(data: Tensor, origin: Origin, requires_grad: bool) -> nn.Parameter:
    """Create this process's shard of `data` as a parameter, without values if `data` is on meta.

    Memory: `data` on the device; only a shard if it is on meta.
    """
    mesh, data = mesh_of(origin), data.detach()
    placement = Shard(0) if data.dim() else Replicate()
    if data.is_meta:
        origin = replace(origin, is_empty=True)
        if mesh.size() > 1:
            data = empty_share(
                data.shape, dtype=data.dtype, device_mesh=mesh, placements=[placement]
            )
        else:
            data = torch.empty_like(data, device=config.device)
    elif mesh.size() > 1:
        cut = distribute_tensor(data.to(config.device), mesh, [placement], src_data_rank=None)
        # Copy the shard, so that the memory of the full tensor is freed.
        data = shard_like(cut.to_local().clone(), cut)
    else:
        data = data.to(config.device)
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    mark_(parameter, origin)
    return parameter


def all_rows(param: Tensor) -> Tensor:
    """Return a parameter's full tensor; an uninitialized one if it has no values yet."""
    origin = origin_of(param)
    if origin is not None and origin.is_empty:
        return torch.empty(param.shape, dtype=param.dtype, device=config.device)
    return gather(param.detach())


def has_values_(tensor: Any) -> None:
    """Mark a parameter or buffer that was created on the meta device as initialized."""
    if isinstance(origin := origin_of(tensor), Origin) and origin.is_empty:
        tensor.origin = replace(origin, is_empty=False)
    elif getattr(tensor, "is_empty", False):
        tensor.is_empty = False


def need_values(model: nn.Module) -> None:
    """Raise an error if a parameter or buffer has no values.

    Raises:
        ConfigError: a parameter or buffer was created on the meta device and never filled.
    """
    empty = [
        n for n, p in model.named_parameters() if (o := origin_of(p)) is not None and o.is_empty
    ]
    empty += [n for n, b in model.named_buffers() if getattr(b, "is_empty", False)]
    if empty:
        shown = ", ".join(empty[:3]) + (f" and {len(empty) - 3} more" if len(empty) > 3 else "")
        raise ConfigError(
            f"{type(model).__name__} was created on the meta device, and {shown} have no "
            "values. Load them with bmt.load(model, file), or initialize them with "
            "bmt.init_parameters(model)."
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = param.device_mesh, param.placements
        return param.full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        grad = grads[0]
        wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
        parts = DTensor.from_local(wide, ctx.mesh, [Partial()], run_check=False)
        return parts.redistribute(ctx.mesh, ctx.placements).to(grad.dtype)


def gather(param: Tensor) -> Tensor:
    """All-gather a parameter for computation; backward reduce-scatters its gradient in fp32."""
    return _Gather.apply(param) if isinstance(param, DTensor) else param


def gather_all(param: Tensor) -> Tensor:
    """All-gather a parameter over the data-parallel and the tensor-parallel processes.

    Comm: two all-gathers, and in backward two reduce-scatters.
    """
    origin, value = origin_of(param), gather(param)
    if origin is None or origin.cut == 1:
        return value
    return gather_tokens(value, config["tp_comm"], origin.tp_split_dim, summed=True)


def full_shape(param: Tensor) -> torch.Size:
    """Return the shape of the unsharded parameter."""
    origin, shape = origin_of(param), list(param.shape)
    if origin is not None and origin.cut > 1:
        shape[origin.tp_split_dim] *= origin.cut
    return torch.Size(shape)


@torch.no_grad()
def whole(param: Tensor, value: Tensor | None = None) -> Tensor:
    """Return the full values of a sharded parameter, the same on every process.

    Args:
        param: parameter that determines the sharding.
        value: tensor sharded like `param`, such as its gradient (default: the values of `param`).

    Comm: all processes must call it.
    """
    origin = origin_of(param)
    if origin is not None and origin.is_empty:
        raise ConfigError(
            "a parameter that was created on the meta device has no values yet. Load a checkpoint "
            "with bmt.load(model, file), or call bmt.init_parameters(model), first."
        )
    value = (param if value is None else value).detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if origin is not None and origin.cut > 1:
        value = all_gather(value, config["tp_comm"], origin.tp_split_dim)
    if origin is not None and origin.stage is not None and config["pipe_size"] > 1:
        if origin.stage != config["topology"].stage_id:
            value = torch.empty(full_shape(param), dtype=param.dtype, device=config.device)
        value = value.contiguous()
        dist.broadcast(value, group=config["pipe_comm"], group_src=origin.stage)
    return value if config.keeps_whole else torch.empty_like(value, device="meta")


def share_like(param: Tensor, value: Tensor) -> Tensor:
    """Return this process's shard of a full tensor, sharded like `param`."""
    origin = origin_of(param)
    if value.shape != full_shape(param):
        raise ConfigError(
            f"the value has shape={tuple(value.shape)}, but the parameter has "
            f"shape={tuple(full_shape(param))}. Pass a value with the shape of the parameter."
        )
    if param.is_meta:
        return torch.empty_like(param, dtype=value.dtype)
    if origin is not None and origin.cut > 1:
        value = value.chunk(origin.cut, origin.tp_split_dim)[config["tp_rank"]]
    value = value.to(config.device)
    return shard_like(value[local_box(param).slices].contiguous(), param)


@torch.no_grad()
def set_values_(param: Tensor, value: Tensor) -> None:
    """Set a sharded parameter to the values of a full tensor."""
    local_tensor(param).copy_(local_tensor(share_like(param, value)))
    has_values_(param)


def mark_(param: nn.Parameter, origin: Origin, **changes: Any) -> None:
    """Set the metadata of a parameter, and attach BMTrain's methods to it."""
    own: Any = param
    own.origin = replace(origin, **changes)
    own.group = origin.group
    own.gather = _Method(gather, param)
    own.gather_all = own.tp_gather = _Method(gather_all, param)
    own.__deepcopy__ = _DeepCopy(gather, param)


class _Method:
    """Function bound to a parameter by a weak reference."""

    def __init__(self, function: Callable[[Tensor], Tensor], param: Tensor | None = None) -> None:
        self._function, self._param = function, None if param is None else weakref.ref(param)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Gather the sharded parameter, as in BMTrain; with arguments, call `torch.gather`."""
        param = None if self._param is None else self._param()
        if param is None:
            raise ConfigError(
                "this is a copy of a distributed parameter, which cannot be gathered. Copy the "
                "result of the parameter's gather() instead."
            )
        if args or kwargs:
            return torch.gather(param, *args, **kwargs)
        return self._function(param)

    def __reduce__(self) -> Any:
        """Pickle only the function: a weak reference to the parameter cannot be pickled."""
        return type(self), (self._function,)


class _DeepCopy(_Method):
    """Implements `copy.deepcopy` of a distributed parameter, keeping its sharding and gradient.

    With torch's own implementation, a copy has no metadata on one process, and shares the metadata
    of the original on several processes.
    """

    def __call__(self, memo: dict[int, Any]) -> Tensor:
        param = None if self._param is None else self._param()
        origin = origin_of(param)
        if not isinstance(param, nn.Parameter) or origin is None:
            raise ConfigError(
                "this copy of a distributed parameter cannot be copied again. Copy the parameter "
                "of the model instead."
            )
        copy = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        if param.grad is not None:
            copy.grad = param.grad.detach().clone()
        mark_(copy, origin)
        memo[id(param)] = copy
        return copy
