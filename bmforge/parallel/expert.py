"""Expert parallelism: every process holds some of the experts, and tokens travel to theirs.

The axis `ep` is borrowed from dp_shard x cp: processes that work on different tokens hold different
experts. Each sorts its tokens by expert, sends them to the experts' processes in one all-to-all,
and gets what they made back in another. What is left of dp_shard x cp shards the experts as ZeRO
does. Nothing else in a model changes.

What must be known about all tokens of a step is summed or gathered here as well: the statistics of
the load-balancing loss, and the affinities by which experts get equally many tokens.

Source: Lepikhin et al., "GShard" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bmforge.parallel.collectives import all_gather, all_reduce, exchange_rows
from bmforge.parallel.groups import build_device_mesh
from bmforge.parallel.layout import axis_group, axis_size
from bmforge.records import fill_slot_
from bmforge.surgery import view_parameters_

__all__ = [
    "apply_expert_parallel_",
    "build_expert_mesh",
    "expert_problems",
    "find_mixtures",
    "share_statistics_",
]

RunExperts = Callable[[Tensor, Tensor], Tensor]
Dispatch = Callable[[Tensor, Tensor, int, RunExperts], Tensor]
# Axes along which processes work on different rows, fastest first.
_ROW_AXES = ("dp_shard", "dp_replicate")


class Mixture(Protocol):
    """What a mixture of experts has; `nn.MoE` is one."""

    num_experts: int
    experts: nn.Module
    dispatch: Dispatch
    assign: Callable[[Tensor], Tensor]


def find_mixtures(model: nn.Module) -> dict[str, Any]:
    """Return name -> mixture of experts."""
    names = Mixture.__annotations__
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in names)
    }


def expert_problems(model: nn.Module, size: int) -> list[str]:
    """Return everything that keeps a model's experts from being divided over `size`."""
    if size == 1:
        return []
    mixtures = find_mixtures(model)
    if not mixtures:
        return [f"ep={size}: {type(model).__name__} has no experts; set ep=1"]
    counts = sorted({mixture.num_experts for mixture in mixtures.values()})
    return [f"ep={size} does not divide the {count} experts" for count in counts if count % size]


def build_expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Build the mesh of the experts' parameters from the processes of `mesh`, in their order.

    Its axes are pp, dp_replicate, zero (what `size` leaves of dp_shard x cp), ep and tp.
    """
    zero = axis_size(mesh, "dp_shard", "cp") // size
    pp, replicas, tp = (axis_size(mesh, axis) for axis in ("pp", "dp_replicate", "tp"))
    names = ("pp", "dp_replicate", "zero", "ep", "tp")
    return build_device_mesh(mesh.device_type, (pp, replicas, zero, size, tp), names)


def apply_expert_parallel_(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide every mixture's experts over the axis `ep`, in place.

    Call it after tensor parallelism, whose cut of each expert stays.

    Args:
        model: any model with mixtures of experts.
        mesh: see `build_expert_mesh`.

    Returns:
        the modules that hold experts.

    Comm: per mixture and forward one all-to-all of E integers and two of the M * k rows of D, and
        in backward two of the rows.
    """
    mixtures = find_mixtures(model).values()
    group, share = axis_group(mesh, "ep"), 1 / axis_size(mesh, "ep")
    for mixture in mixtures:
        view = partial(_view_shared, share)
        for module in mixture.experts.modules():  # the experts, and what stands beside them
            _divide_parameters_(module, mesh)
            keys = [key for key, _ in module.named_parameters(recurse=False)]
            view_parameters_(module, dict.fromkeys(keys, view), "experts")
        mixture.dispatch = partial(_dispatch_far, mixture.dispatch, group)
    return [mixture.experts for mixture in mixtures]


def _divide_parameters_(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters, (E, ...) each, DTensors with this process's experts."""
    for key, parameter in list(experts.named_parameters(recurse=False)):
        whole, cut = parameter.detach(), ()
        if isinstance(whole, DTensor):
            local, cut = whole.to_local(), whole.placements
        else:
            local = whole
        count = local.shape[0] // axis_size(mesh, "ep")
        here = local.narrow(0, mesh.get_local_rank("ep") * count, count).clone()
        made = DTensor.from_local(
            here,
            mesh["ep", "tp"] if cut else mesh["ep"],
            [Shard(0), *cut],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        new = nn.Parameter(made, requires_grad=parameter.requires_grad)
        experts.register_parameter(key, new)


class _ScaleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def _view_shared(share: float, parameter: Tensor) -> Tensor:
    """Return the experts here, with a gradient that is a mean as all others are.

    Gradients are averaged over all processes that work on different tokens. These experts saw the
    tokens of `ep` of them and are averaged over the rest only: a division by `ep` is missing.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return _ScaleBackward.apply(local, share)


@torch.compiler.disable
def _dispatch_far(
    inner: Dispatch,
    group: dist.ProcessGroup,
    x: Tensor,
    index: Tensor,
    num_experts: int,
    run: RunExperts,
) -> Tensor:
    """Bring tokens to experts on all processes of a group, and what they made back.

    Args:
        inner: the same for experts that are all here.
        group: the processes, each with equally many experts.
        x, index, num_experts, run: as there, `run` being this process's experts' work.
    """
    here = num_experts // group.size()

    def run_far(rows: Tensor, ends: Tensor) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = torch.stack((counts, arriving)).view(2, -1, here).sum(2).tolist()
        # Rows that no expert took lie last and stay.
        arrived = exchange_rows(rows[: sum(sent)], group, sent, received)
        numbers = torch.arange(here, device=x.device).repeat(group.size())
        numbers = numbers.repeat_interleave(arriving, output_size=sum(received))
        made = inner(arrived, numbers.unsqueeze(1), here, run).squeeze(1)
        back = exchange_rows(made, group, received, sent)
        return F.pad(back, (0, 0, 0, rows.shape[0] - back.shape[0]))

    return inner(x, index, num_experts, run_far)


def share_statistics_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let what depends on all tokens of a step know those of all processes, in place.

    Comm: per step one all-reduce of 2 E + 3 numbers where
        the model has a load-balancing loss; per mixture with balanced loads an all-gather of M * E
        affinities.
    """
    by_rows = _groups_of(mesh, *_ROW_AXES)
    # Behind the blocks all processes have all tokens of a row again.
    if by_rows and hasattr(model, "sum_statistics"):
        fill_slot_(model, "sum_statistics", partial(_sum_over, by_rows))
    by_tokens = _groups_of(mesh, "cp", *_ROW_AXES)
    for mixture in find_mixtures(model).values() if by_tokens else ():
        mixture.assign = partial(_assign_together, mixture.assign, by_tokens)


def _groups_of(mesh: DeviceMesh, *axes: str) -> list[dist.ProcessGroup]:
    return [axis_group(mesh, axis) for axis in axes if mesh[axis].size() > 1]


@torch.compiler.disable
def _sum_over(groups: Sequence[dist.ProcessGroup], values: Tensor) -> Tensor:
    for group in groups:
        values = all_reduce(values, group)
    return values


def _lengths(rows: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return how many rows every process of a group has."""
    length = torch.tensor([rows.shape[0]], device=rows.device)
    found: list[int] = all_gather(length, group, 0).tolist()
    return found


@torch.compiler.disable
def _assign_together(
    assign: Callable[[Tensor], Tensor], groups: Sequence[dist.ProcessGroup], affinity: Tensor
) -> Tensor:
    """Assign the tokens of all processes at once, on every one alike; return those here.

    Tokens are in the order of the processes, which is that of a batch's rows. Divided rows come in
    another one, which makes a difference only among tokens that are equal in every bit.

    Shape:
        affinity: (M, E), M may differ -> (M,)
    """
    everyone = affinity.detach()
    first, count = 0, everyone.shape[0]
    for group in groups:
        lengths = _lengths(everyone, group)
        padded = F.pad(everyone, (0, 0, 0, max(lengths) - everyone.shape[0]))
        parts = all_gather(padded, group, 0).chunk(group.size())
        everyone = torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])
        first += sum(lengths[: group.rank()])
    return assign(everyone)[first : first + count]
