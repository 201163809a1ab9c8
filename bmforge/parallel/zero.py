"""ZeRO-2, ZeRO-3 and HSDP: one sharded unit per block, the rest in the root's.

Source: Rajbhandari et al., "ZeRO" (2020); the mechanics are torch's `fully_shard` (FSDP2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

__all__ = ["apply_zero_", "reshard_"]


def apply_zero_(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    zero: int,
    dtype: torch.dtype | None,
    prefetch: int = 1,
) -> None:
    """Shard `units`, then what is left of `model`, over the mesh.

    Args:
        model: the root.
        units: modules gathered as a whole, in the order they run.
        mesh: axes (dp_replicate, dp_shard).
        zero: 3 frees gathered parameters after forward, 0 and 2 keep them for backward.
        dtype: parameters are gathered and used in it, gradients reduced in fp32; None: as stored.
        prefetch: how many units ahead parameters are gathered while one computes.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # A replicating axis of length 1 would only add an all-reduce among one.
    used = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh
    for unit in units:
        fully_shard(unit, mesh=used, reshard_after_forward=zero == 3, mp_policy=policy)
    fully_shard(model, mesh=used, reshard_after_forward=False, mp_policy=policy)
    sharded = [unit for unit in units if isinstance(unit, FSDPModule)]
    for index, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + prefetch])
        unit.set_modules_to_backward_prefetch(sharded[max(0, index - prefetch) : index][::-1])


def reshard_(model: nn.Module) -> None:
    """Free the gathered parameters, so that the model holds its shards again.

    Backward does this by itself; after a forward without one (evaluating, generating) the root, and
    with ZeRO-2 every unit, still holds whole parameters, which are not the optimizer's.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
