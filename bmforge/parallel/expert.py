"""Expert parallelism: experts are sharded over processes, and tokens are sent to them.

The axis `ep` divides dp_shard x cp: processes that work on different tokens hold different experts.
Each process sorts its tokens by expert, sends them to the processes of the experts in one
all-to-all, and receives the results in another. ZeRO shards the experts over the remaining factor
of dp_shard x cp. Other modules are unchanged.

The module also sums the statistics of the load-balancing loss, and gathers the affinities for
balanced token assignment, over all tokens of a step.

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

from bmforge.nn.foreign_experts import foreign_stacks, is_foreign_experts, run_foreign_grouped
from bmforge.nn.moe import dispatch_locally
from bmforge.nn.part import adapters_of
from bmforge.parallel.collectives import all_gather, all_reduce, exchange_rows
from bmforge.parallel.groups import build_device_mesh
from bmforge.parallel.layout import axis_group, axis_size
from bmforge.records import fill_slot_
from bmforge.surgery import view_parameters_, wrap_forward_

__all__ = [
    "apply_expert_parallel_",
    "build_expert_mesh",
    "expert_problems",
    "find_mixtures",
    "share_statistics_",
]

RunExperts = Callable[[Tensor, Tensor], Tensor]
Dispatch = Callable[[Tensor, Tensor, int, RunExperts], Tensor]
# Axes along which processes process different samples, the fastest-varying axis first.
_ROW_AXES = ("dp_shard", "dp_replicate")


class MixtureOfExperts(Protocol):
    """Interface that expert parallelism needs of an MoE layer; implemented by `nn.MoE`."""

    num_experts: int
    experts: nn.Module
    dispatch: Dispatch
    assign: Callable[[Tensor], Tensor]


def find_mixtures(model: nn.Module) -> dict[str, Any]:
    """Return a dict from name to module of a model's MoE layers."""
    names = MixtureOfExperts.__annotations__
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in names)
    }


def expert_problems(model: nn.Module, size: int) -> list[str]:
    """Return the reasons why a model's experts cannot be sharded over `size` processes."""
    if size == 1:
        return []
    mixtures, foreign = find_mixtures(model), _find_foreign(model)
    if not mixtures and not foreign:
        return [f"ep={size}: {type(model).__name__} has no experts; set ep=1"]
    counts = {mixture.num_experts for mixture in mixtures.values()}
    counts |= {_count_experts(module) for module in foreign.values()}
    problems = [f"ep={size} does not divide the {n} experts" for n in sorted(counts) if n % size]
    for name, module in foreign.items():
        stacked = all(p.shape[:1] == (_count_experts(module),) for p in module.parameters())
        if not stacked or any(True for _ in adapters_of(module)):
            problems.append(f"ep={size}: the experts {name} have parameters that are not stacked")
    return problems


def _find_foreign(model: nn.Module) -> dict[str, nn.Module]:
    """Return a dict from name to module of transformers' stacked experts."""
    return {name: module for name, module in model.named_modules() if is_foreign_experts(module)}


def _count_experts(module: nn.Module) -> int:
    return next(iter(foreign_stacks(module).values())).shape[0]


def build_expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Build the mesh of the experts' parameters from the processes of `mesh`, in their order.

    Its axes are pp, dp_replicate, zero (dp_shard x cp divided by `size`), ep and tp.
    """
    zero = axis_size(mesh, "dp_shard", "cp") // size
    pp, replicas, tp = (axis_size(mesh, axis) for axis in ("pp", "dp_replicate", "tp"))
    names = ("pp", "dp_replicate", "zero", "ep", "tp")
    return build_device_mesh(mesh.device_type, (pp, replicas, zero, size, tp), names)


def apply_expert_parallel_(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard the experts of every MoE layer over the mesh axis `ep`, in place.

    Call it after tensor parallelism; each expert stays sharded over the tensor-parallel ranks.

    Args:
        model: model with MoE layers.
        mesh: mesh built by `build_expert_mesh`.

    Returns:
        modules with the experts' parameters

    Comm: per MoE layer one all-to-all of E integers (E: number of experts), and two all-to-alls of
    M * k rows of width D in forward and two in backward, for M tokens with k experts each.
    """
    mixtures = find_mixtures(model).values()
    group, share = axis_group(mesh, "ep"), 1 / axis_size(mesh, "ep")
    for mixture in mixtures:
        view = partial(_view_shared, share)
        for module in mixture.experts.modules():  # the experts and the adapters attached to them
            _divide_parameters_(module, mesh)
            keys = [key for key, _ in module.named_parameters(recurse=False)]
            view_parameters_(module, dict.fromkeys(keys, view), "experts")
        mixture.dispatch = partial(_dispatch_far, mixture.dispatch, group)
    foreign = list(_find_foreign(model).values())
    for experts in foreign:
        count = _count_experts(experts)
        _divide_parameters_(experts, mesh)
        keys = [key for key, _ in experts.named_parameters(recurse=False)]
        wrap_forward_(experts, partial(_run_foreign_far, experts, group, count), "part")
        view_parameters_(experts, dict.fromkeys(keys, partial(_view_shared, share)), "experts")
    return [*(mixture.experts for mixture in mixtures), *foreign]


def _run_foreign_far(
    experts: nn.Module,
    group: dist.ProcessGroup,
    count: int,
    inner: Callable[..., Tensor],
    /,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Run transformers' experts on all processes; replaces the forward of the experts module.

    Args:
        experts: module with this process's experts.
        group: process group, with the same number of experts per process.
        count: number of experts of all processes.
        inner: replaced forward, which is not called.
        hidden_states, top_k_index, top_k_weights: arguments of transformers' experts.

    Shape:
        hidden_states: (M, D); top_k_index, top_k_weights: (M, k); returns (M, D)
    """
    run = partial(run_foreign_grouped, experts)
    parts = _dispatch_far(dispatch_locally, group, hidden_states, top_k_index, count, run)
    return (parts * top_k_weights[..., None].to(parts.dtype)).sum(1).to(hidden_states.dtype)


def _divide_parameters_(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the stacked expert parameters, (E, ...), with DTensors sharded by expert."""
    for key, parameter in list(experts.named_parameters(recurse=False)):
        stacked, cut = parameter.detach(), ()
        if isinstance(stacked, DTensor):
            local, cut = stacked.to_local(), stacked.placements
        else:
            local = stacked
        count = local.shape[0] // axis_size(mesh, "ep")
        # A clone, because a view would keep the memory of all experts.
        local_experts = local.narrow(0, mesh.get_local_rank("ep") * count, count).clone()
        distributed = DTensor.from_local(
            local_experts,
            mesh["ep", "tp"] if cut else mesh["ep"],
            [Shard(0), *cut],
            run_check=False,
            shape=stacked.shape,
            stride=stacked.stride(),
        )
        new = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
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
    """Return this process's experts; scale their gradient by `share` (1 / ep).

    Gradients are averaged over all processes with different tokens. The local experts processed the
    tokens of `ep` processes, but their gradients are averaged only over the processes that hold the
    same experts. `share` makes up for the missing division by `ep`.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return _ScaleBackward.apply(local, share)


@torch._disable_dynamo  # `torch.compiler.disable` would import torch._dynamo with this module
def _dispatch_far(
    inner: Dispatch,
    group: dist.ProcessGroup,
    x: Tensor,
    index: Tensor,
    num_experts: int,
    run: RunExperts,
) -> Tensor:
    """Send tokens to the experts on all processes of a group, and return the experts' outputs.

    Args:
        inner: dispatch function for experts that are all local.
        group: process group, with the same number of experts on each process.
        x: tokens, as for `inner`.
        index: experts chosen for each token, as for `inner`.
        num_experts: number of experts of all processes.
        run: function that computes this process's experts.
    """
    num_local = num_experts // group.size()

    def run_far(rows: Tensor, ends: Tensor) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        # The receivers need the number of rows of each expert before the rows.
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # The host needs both lists: one transfer, and one wait for the device.
        sent, received = torch.stack((counts, arriving)).view(2, -1, num_local).sum(2).tolist()
        # Rows without an expert come last and are not sent.
        received_rows = exchange_rows(rows[: sum(sent)], group, sent, received)
        # Arrived rows are ordered by source process, then by expert, so they are dispatched once
        # more.
        numbers = torch.arange(num_local, device=x.device).repeat(group.size())
        numbers = numbers.repeat_interleave(arriving, output_size=sum(received))
        outputs = inner(received_rows, numbers.unsqueeze(1), num_local, run).squeeze(1)
        back = exchange_rows(outputs, group, received, sent)
        # Rows that were not sent, those without an expert, get zeros.
        return F.pad(back, (0, 0, 0, rows.shape[0] - back.shape[0]))

    return inner(x, index, num_experts, run_far)


def share_statistics_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compute load-balancing statistics and token assignment over the tokens of all processes.

    Comm: per step one all-reduce of 2 E + 3 numbers if the model has a load-balancing loss; per MoE
        layer with balanced loads an all-gather of M * E affinities.
    """
    by_rows = _groups_of(mesh, *_ROW_AXES)
    # After the blocks the tokens of a sequence are replicated again.
    if by_rows and hasattr(model, "sum_statistics"):
        fill_slot_(model, "sum_statistics", partial(_sum_over, by_rows))
    by_tokens = _groups_of(mesh, "cp", *_ROW_AXES)
    for mixture in find_mixtures(model).values() if by_tokens else ():
        mixture.assign = partial(_assign_together, mixture.assign, by_tokens)


def _groups_of(mesh: DeviceMesh, *axes: str) -> list[dist.ProcessGroup]:
    return [axis_group(mesh, axis) for axis in axes if mesh[axis].size() > 1]


@torch._disable_dynamo  # `torch.compiler.disable` would import torch._dynamo with this module
def _sum_over(groups: Sequence[dist.ProcessGroup], values: Tensor) -> Tensor:
    for group in groups:
        values = all_reduce(values, group)
    return values


def _lengths(rows: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the number of rows of a tensor on every process of a group."""
    length = torch.tensor([rows.shape[0]], device=rows.device)
    lengths: list[int] = all_gather(length, group, 0).tolist()
    return lengths


@torch._disable_dynamo  # `torch.compiler.disable` would import torch._dynamo with this module
def _assign_together(
    assign: Callable[[Tensor], Tensor], groups: Sequence[dist.ProcessGroup], affinity: Tensor
) -> Tensor:
    """Assign the tokens of all processes to experts; return the assignment of the local tokens.

    Every process computes the same assignment, over the tokens in the order of the processes, which
    is the order of the rows of a batch. With sharded sequences the order differs, which changes the
    result only for tokens that are bitwise equal.

    Shape:
        affinity: (M, E) -> (M,); M may differ between processes
    """
    everyone = affinity.detach()
    first, count = 0, everyone.shape[0]
    for group in groups:
        lengths = _lengths(everyone, group)
        # An all-gather needs equal lengths; the padding is cut off again, so it gets no expert.
        padded = F.pad(everyone, (0, 0, 0, max(lengths) - everyone.shape[0]))
        parts = all_gather(padded, group, 0).chunk(group.size())
        everyone = torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])
        first += sum(lengths[: group.rank()])
    return assign(everyone)[first : first + count]
