"""ZeRO-2, ZeRO-3 and HSDP: one sharded unit per block, and one for all other parameters.

Source: Rajbhandari et al., "ZeRO" (2020); implemented with torch's `fully_shard` (FSDP2).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from bmforge.errors import ConfigError
from bmforge.parallel.groups import flatten_mesh
from bmforge.parallel.parameters import scalars_of
from bmforge.records import swap_

__all__ = [
    "apply_zero_",
    "change_dtype_",
    "groups_of_state",
    "half_units",
    "param_groups_of",
    "refuse_calls_outside_",
    "reshard_",
]


def apply_zero_(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    zero: int,
    dtype: torch.dtype | None,
    prefetch: int = 1,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard `experts`, then `units`, then the other parameters of `model`, over the mesh.

    Args:
        model: root module.
        units: modules whose parameters are all-gathered together, in execution order.
        mesh: mesh with all axes.
        zero: ZeRO stage: 3 frees gathered parameters after forward, 0 and 2 keep them for backward.
        dtype: dtype in which parameters are gathered and used, with gradients reduced in fp32;
            None means the stored dtype.
        prefetch: number of units gathered ahead while one computes.
        experts: modules sharded over the axis `ep`; each is gathered separately from the unit that
            contains it.
        expert_mesh: mesh of the experts, see `expert.build_expert_mesh`.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        # Sums of 16-bit gradients over many processes would lose small contributions.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    used = _sharding_mesh(mesh, zero)
    _average_scalar_gradients_(model, used)
    ignored = {*scalars_of(model), *_usable_as_stored(model, used, dtype)}
    if expert_mesh is not None:
        ignored |= _shard_experts_(experts, expert_mesh, policy)
    settings = {"mesh": used, "mp_policy": policy, "ignored_params": ignored}
    if used.size() > 1:
        _reach_all_experts_(units)
    # Innermost first: `fully_shard` takes the parameters that no inner module has taken.
    for module in (*units, model):
        fully_shard(module, reshard_after_forward=False, **settings)
    if used.shape[-1] == 1:
        for module in (*units, model):
            module.set_custom_reduce_scatter(_OneBuffer())
    _name_as_before_([*experts, *units, model])
    if zero == 3:
        _free_after_forward_([*experts, *units])
    if callable(getattr(model, "encode", None)):  # an entry point that does not call forward
        register_fsdp_forward_method(model, "encode")
    _set_prefetch_(units, experts, prefetch)


def _usable_as_stored(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None
) -> list[nn.Parameter]:
    """Return the frozen parameters that blocks can use directly, without a gathered copy.

    FSDP2 copies a unit's parameters into a buffer even if there is one shard, which doubles the
    memory of a frozen base model.
    """
    if mesh.shape[-1] > 1:
        return []
    return [
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad
        and not isinstance(parameter, DTensor)
        and (not parameter.is_floating_point() or dtype in (None, parameter.dtype))
    ]


def _average_scalar_gradients_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of scalar parameters over a mesh during backward.

    FSDP2 shards along a dim and a scalar has none, so scalars are replicated. A tensor hook
    receives the gradient of one backward pass, before it is added to that of earlier micro-batches.
    Materializing a meta model replaces its parameters, so the hooks are attached in forward.
    """
    hooked = WeakIdKeyDictionary()

    def average(gradient: Tensor) -> Tensor:
        # The tensor may also be the gradient of other inputs, and the all-reduce is in place.
        total = gradient.clone()
        for axis in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(axis))
        return total / mesh.size()

    def attach(module: nn.Module, args: Any) -> None:
        for parameter in scalars_of(module):
            if parameter.requires_grad and parameter not in hooked:
                hooked[parameter] = parameter.register_hook(average)

    if mesh.size() > 1 and scalars_of(model):
        model.register_forward_pre_hook(attach)


class _Reach(torch.autograd.Function):
    """Identity on a tensor, whose backward adds zeros to the gradients of other tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.likes = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        zeros = (torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.likes)
        return (gradients[0], *zeros)


def _reach_all_experts_(units: Sequence[nn.Module]) -> None:
    """Give experts that received no tokens zero gradients.

    FSDP2 reduces only the parameters that have a gradient. If a model keeps its experts in a list
    and calls only those with tokens, the processes would reduce buffers of different sizes.
    """
    for unit in units:
        lists = [
            part for part in unit.modules() if isinstance(part, (nn.ModuleList, nn.ModuleDict))
        ]
        if lists:
            unit.register_forward_hook(partial(_reach, lists))


def _reach(lists: Sequence[nn.Module], unit: nn.Module, args: Any, out: Any) -> Any:
    others = [p for part in lists for p in part.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not others:
        return None
    if isinstance(out, Tensor):
        return _Reach.apply(out, *others)
    return (_Reach.apply(out[0], *others), *out[1:]) if isinstance(out, tuple) else None


def refuse_calls_outside_(units: Mapping[str, nn.Module]) -> None:
    """Make submodules raise a clear error if they are called while their unit is sharded.

    Args:
        units: dict from name to sharded module, which gathers its parameters only while it runs.
    """
    for name, unit in units.items():
        for inner, module in unit.named_modules():
            first = next(iter(dict(module.named_parameters(recurse=False))), None)
            if inner and first is not None:
                check = partial(_check_gathered, unit, name, inner, first)
                module.register_forward_pre_hook(check)


def _check_gathered(
    root: nn.Module, unit: str, inner: str, parameter: str, module: nn.Module, args: Any
) -> None:
    value = module._parameters.get(parameter)
    # Experts of expert parallelism are DTensors of another mesh, which their layer handles itself.
    if isinstance(value, DTensor) and _is_fsdp_shard(root, value):
        raise ConfigError(
            f"{unit}.{inner} was called outside of {unit}.forward, while its parameter "
            f"{unit}.{inner}.{parameter} is sharded (ZeRO gathers the parameters of a unit only "
            f"during its forward). Do not make {unit} a ZeRO unit: call parallelize with "
            f"rules=LayoutRules(zero_units=...), a list of units without {unit}."
        )


def _is_fsdp_shard(unit: nn.Module, parameter: Tensor) -> bool:
    """Return True if `fully_shard` manages the parameter as a part of the unit."""
    groups = param_groups_of(unit)
    return any(p.sharded_param is parameter for group in groups for p in group.fsdp_params)


class _OneBuffer:
    """Gradient reduction over a single shard with one buffer for input and output.

    FSDP2 allocates two buffers, and with one process copies one into the other. This costs a memory
    pass over all gradients in fp32, which a shared buffer avoids.
    """

    def __init__(self) -> None:
        # Weak: a buffer is freed if a reduction fails between its two allocations.
        self._before: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the reduction's input buffer; return the same buffer for its output."""
        previous = None if self._before is None else self._before()
        self._before = None
        if previous is not None and previous.shape == torch.Size(size) and previous.dtype == dtype:
            return previous
        buffer = torch.empty(size, dtype=dtype, device=device)
        self._before = weakref.ref(buffer)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *arguments: Any, **more: Any
    ) -> None:
        """Copy the input to the output if they differ; unused by newer torch versions."""
        if output_tensor is not input_tensor:
            output_tensor.copy_(input_tensor)


def _name_as_before_(modules: Sequence[nn.Module]) -> None:
    """Restore the original class names, which FSDP2 changes, for logs and errors."""
    for module in modules:
        if isinstance(module, FSDPModule):
            subclass = type(module)
            # The second base class is the original one; the first is `FSDPModule`.
            subclass.__name__ = subclass.__qualname__ = subclass.__bases__[1].__name__


def _sharding_mesh(mesh: DeviceMesh, zero: int) -> DeviceMesh:
    """Return the mesh for `fully_shard`: the shard axis, after a replicate axis if there is one.

    Processes along `cp` have the same parameters, so `cp` is merged into one of the two axes.
    """
    copies, shards = mesh["dp_replicate"], mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        joined = ("dp_replicate", "cp") if zero == 0 else ("dp_shard", "cp")
        flat = flatten_mesh(mesh[joined], "_".join(joined))
        copies, shards = (flat, shards) if zero == 0 else (copies, flat)
    # A replicate axis of length 1 would only add an all-reduce of one process.
    return shards if copies.size() == 1 else DeviceMesh._concatenate([copies, shards])


def _shard_experts_(
    experts: Sequence[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> set[nn.Parameter]:
    """Shard the experts over the axis `zero`; return the parameters that stay unsharded."""
    replicates, size = mesh["dp_replicate"].size() > 1, mesh["zero"].size()
    if size == 1 and not replicates and policy.param_dtype is None:
        return {parameter for module in experts for parameter in module.parameters()}
    used = mesh["dp_replicate", "zero"] if replicates else mesh["zero"]
    for module in experts:
        fully_shard(
            module,
            mesh=used,
            reshard_after_forward=False,
            mp_policy=policy,
            shard_placement_fn=partial(_even_dim, size),
        )
    return set()


def _free_after_forward_(modules: Sequence[nn.Module]) -> None:
    """Make FSDP modules free their gathered parameters after forward.

    Passing `reshard_after_forward=True` to `fully_shard` would also split every parameter into
    views for partial resharding, which is not used.
    """
    for module in modules:
        if isinstance(module, FSDPModule):  # experts without sharding are plain modules
            module.set_reshard_after_forward(True, recurse=False)


def _even_dim(size: int, parameter: nn.Parameter) -> Shard | None:
    """Choose the first dim that shards evenly over all processes.

    Dim 0 of expert parameters may be too short to be sharded, as each process has few experts.
    """
    assert isinstance(parameter, DTensor)
    # Tensor and expert parallelism may have sharded a dim already; ZeRO shards what is left of it.
    cuts = [1] * parameter.dim()
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            cuts[placement.dim] *= parameter.device_mesh.size(axis)
    even = (d for d, n in enumerate(parameter.shape) if n % (cuts[d] * size) == 0)
    return Shard(next(even, 0))


def _set_prefetch_(units: Sequence[nn.Module], experts: Sequence[nn.Module], prefetch: int) -> None:
    """Set the units that each unit prefetches; experts are gathered after their unit starts."""
    inner = {id(module) for module in experts}
    groups = [[unit, *(m for m in unit.modules() if id(m) in inner)] for unit in units]
    forward = [m for group in groups for m in group if isinstance(m, FSDPModule)]
    # Within a unit the experts follow their unit in both directions: hooks gather the outer unit
    # first.
    backward = [m for group in groups[::-1] for m in group if isinstance(m, FSDPModule)]
    for index, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + prefetch])
    for index, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[index + 1 : index + 1 + prefetch])


def half_units(model: nn.Module, dtype: torch.dtype) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of every unit that computes in `dtype` but stores a wider dtype."""
    for module in model.modules():
        for group in param_groups_of(module):
            if group.mp_policy.param_dtype == dtype:
                yield [parameter.sharded_param for parameter in group.fsdp_params]


def change_dtype_(model: nn.Module, chosen: set[int], dtype: torch.dtype) -> None:
    """Change the stored dtype of the chosen sharded parameters, which must form whole units.

    The parameters stay the same objects. Call it between steps, with the model resharded.
    """
    for module in model.modules():
        for group in param_groups_of(module):
            chosen_params = [
                fsdp_param
                for fsdp_param in group.fsdp_params
                if id(fsdp_param.sharded_param) in chosen
            ]
            for fsdp_param in chosen_params:
                old = fsdp_param.sharded_param
                new = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
                swap_(old, new)
                fsdp_param.reset_sharded_param()
            if chosen_params:
                # FSDP2 caches the dtypes of a unit's parameters, and the next all-gather would use
                # the old ones.
                group._init_mp_dtypes()


def param_groups_of(module: nn.Module) -> list[Any]:
    """Return the FSDP2 parameter groups of a module; [] if it is not a unit."""
    if not isinstance(module, FSDPModule):
        return []
    return groups_of_state(fully_shard.state(module))  # type: ignore[attr-defined]


def groups_of_state(state: Any) -> list[Any]:
    """Return the parameter groups in a module's FSDP2 state, in any torch version."""
    group = getattr(state, "_fsdp_param_group", None)
    return getattr(state, "_fsdp_param_groups", [group] if group else [])


def reshard_(model: nn.Module) -> None:
    """Free the gathered parameters, so that the model keeps only its shards.

    Backward reshards the parameters by itself. After a forward pass without a backward pass
    (evaluation, generation), the root module, and with ZeRO-2 every unit, still has whole
    parameters, which the optimizer does not update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
