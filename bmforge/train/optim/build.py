"""Builds optimizers (AdamW, SGD, Muon) and clips gradients.

Start at `build_optimizers`. All functions work on unsharded parameters and on sharded ones
(DTensor), with the same results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError, DistributedError
from bmforge.parallel import offloaded_gradient, pipeline_of
from bmforge.shards import local_tensor
from bmforge.train.offload.optimizers import OffloadedAdamW, OffloadedMuon
from bmforge.train.optim.groups import (
    Named,
    OptimGroup,
    by_mesh,
    check_globs,
    make_groups,
    param_groups,
)
from bmforge.train.optim.muon import Muon
from bmforge.value_ranges import check_values

__all__ = [
    "Muon",
    "OptimConfig",
    "OptimGroup",
    "build_optimizers",
    "clip_grad_norm_",
    "param_groups",
]

# Optimizer name -> settings that have no effect on it.
_UNUSED = {
    "adamw": ("momentum", "muon_lr", "ns_steps"),
    "muon": (),
    "sgd": ("betas", "eps", "muon_lr", "ns_steps"),
}
_NOT_HIDDEN = ("embed*", "*_head", "classifier*", "rel_bias")


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and its hyperparameters.

    Args:
        name: optimizer: adamw, sgd, or muon (Muon for hidden matrices, AdamW for all other
            parameters).
        lr: peak learning rate, which the schedule multiplies by a factor from 0 to 1.
        weight_decay: weight decay, decoupled for adamw and muon; it is not applied to norms, biases
            and other vectors.
        betas: decay rates of AdamW's first and second moments; with muon, for the parameters that
            AdamW trains.
        eps: epsilon of AdamW; with muon, for the parameters that AdamW trains.
        momentum: momentum of Muon or SGD (if None: 0.95 for muon, 0.9 for sgd).
        muon_lr: peak learning rate of the hidden matrices with muon. Updates are scaled to the RMS
            of AdamW's updates, so that a learning rate for AdamW is suitable (if None: `lr`).
        ns_steps: number of Newton-Schulz iterations of muon (if None: 5).
        groups: parameter groups with their own learning rate or weight decay; name globs select
            their parameters.
    """

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float | None = None
    muon_lr: float | None = None
    ns_steps: int | None = None
    groups: tuple[OptimGroup, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range or without effect."""
        check_values(self, "train.optim.")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(
                f"optim.betas={self.betas} must be two numbers, at least 0 and below 1."
            )
        for field in _UNUSED[self.name]:
            if getattr(self, field) != type(self).__dataclass_fields__[field].default:
                raise ConfigError(
                    f"optim.{field}={getattr(self, field)} has no effect with "
                    f"optim.name={self.name!r}. Leave it out or choose another optimizer."
                )

    def to_record(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        groups = [asdict(group) for group in self.groups]
        return {**asdict(self), "betas": list(self.betas), "groups": groups}

    def check_same(self, before: Mapping[str, Any], overridden: Collection[str] = ()) -> None:
        """Check that a resumed run has the recorded settings; settings without a record may differ.

        Args:
            before: record in the run's checkpoint.
            overridden: settings that may differ, such as ``train.optim.lr``; ``train.optim``
                means all.

        Raises:
            ConfigError: the settings differ, and the resumed optimizers would keep the old ones.
        """
        changed = [
            f"optim.{name}={value!r} (was {before[name]!r})"
            for name, value in self.to_record().items()
            if before.get(name, value) != value
            and not {"train", "train.optim", f"train.optim.{name}"} & set(overridden)
        ]
        if changed:
            raise ConfigError(
                f"the run to resume was started with other settings: {', '.join(changed)}. "
                "Restore the earlier settings, or start a new run in another run_dir."
            )


def restore_settings_(
    optimizers: Sequence[torch.optim.Optimizer], settings: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Restore the hyperparameters of every parameter group from copies of the groups.

    Args:
        optimizers: optimizers whose groups were changed by loading a checkpoint.
        settings: copies of their parameter groups.
    """
    for optimizer, groups in zip(optimizers, settings, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def build_optimizers(
    model: nn.Module, config: OptimConfig, *, offloaded: bool = False
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a run, after `parallelize`; call `step` on all of them.

    Each parameter group has its peak learning rate in ``base_lr`` and its parameter names in
    ``param_names``. In a pipeline a process has optimizers for its own stages only, possibly fewer
    than other processes, or none if its stages have no trained parameters.

    Args:
        model: parallelized model.
        config: optimizer settings.
        offloaded: build optimizers whose state can be offloaded, see `StateOffload`.

    Raises:
        ConfigError: no parameter is trainable, there is no hidden matrix for Muon, or the
            optimizer cannot be offloaded. The error is the same on every process.

    Comm: in a pipeline, one all-reduce of two integers over its ranks.
    """
    if config.name == "sgd" and offloaded:
        raise ConfigError(
            "optim.name='sgd' cannot be offloaded (supported: adamw, muon). Set "
            "offload.fraction=0 or another optim.name."
        )
    named = _trainable(model)
    hidden = _hidden_matrices(model, named) if config.name == "muon" else []
    _check_trainable(model, config, named, hidden)
    check_globs(model, config.groups)
    taken = {name for name, _ in hidden}
    others = [(name, parameter) for name, parameter in named if name not in taken]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(_muon(hidden, config, offloaded))
    if others and config.name == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        groups = make_groups(others, config.lr, config.weight_decay, config.groups)
        optimizers.append(torch.optim.SGD(groups, momentum=momentum))
    elif others:
        optimizers.append(_adamw(others, config, offloaded))
    return optimizers


def _check_trainable(
    model: nn.Module,
    config: OptimConfig,
    named: Named,
    hidden: Named,
) -> None:
    """Raise an error if no stage of the pipeline has trainable parameters."""
    numbers, pipeline = [len(named), len(hidden)], pipeline_of(model)
    if pipeline is not None:
        counts = torch.tensor(numbers, device=pipeline.mesh.device_type)
        dist.all_reduce(counts, group=pipeline.group)
        numbers = counts.tolist()
    if not numbers[0]:
        raise ConfigError(
            "the model has no trainable parameters, because requires_grad is False for all of "
            "them. Set requires_grad=True for the parameters that you want to train."
        )
    if config.name == "muon" and not numbers[1]:
        raise ConfigError(
            "optim.name='muon' needs trainable hidden matrices (2-dim parameters outside "
            "embeddings and heads), but this model has none. Use optim.name='adamw'."
        )


def _muon(hidden: Named, config: OptimConfig, offloaded: bool) -> torch.optim.Optimizer:
    lr = config.lr if config.muon_lr is None else config.muon_lr
    return (OffloadedMuon if offloaded else Muon)(
        make_groups(hidden, lr, config.weight_decay, config.groups),
        momentum=0.95 if config.momentum is None else config.momentum,
        ns_steps=5 if config.ns_steps is None else config.ns_steps,
    )


def _trainable(model: nn.Module) -> Named:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _adamw(named: Named, config: OptimConfig, offloaded: bool) -> torch.optim.Optimizer:
    """Build AdamW: fused, or torch's default implementation if there is no fused kernel."""
    groups = by_mesh(make_groups(named, config.lr, config.weight_decay, config.groups))
    settings = {"betas": config.betas, "eps": config.eps}
    kind = OffloadedAdamW if offloaded else torch.optim.AdamW
    try:
        return kind([dict(group) for group in groups], fused=True, **settings)
    except RuntimeError:
        return kind(groups, **settings)


def _hidden_matrices(model: nn.Module, named: Named) -> Named:
    """Return the parameters for Muon: matrices except embeddings, head and biases."""
    embeddings = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(False)
    }
    return [
        (name, p)
        for name, p in named
        if p.dim() == 2
        and id(p) not in embeddings
        and not name.endswith(("_bias", ".bias"))
        and not any(fnmatchcase(part, glob) for part in name.split(".") for glob in _NOT_HIDDEN)
    ]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | nn.Module, max_norm: float | None) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before clipping.

    Unsharded parameters and parameters sharded over different meshes may be mixed. An unsharded
    gradient counts once: it must already be the same on every process.

    Args:
        parameters: parameters, in the same order on every process; for a pipelined model the model
            itself, as processes have different parameters.
        max_norm: maximum norm, above 0; if None, the norm is only measured.

    Returns:
        The 2-norm over all gradients as a 0-dim tensor (not a DTensor), the same on every process;
        float64 if any gradient is float64, otherwise float32.

    Comm: one all-reduce of one number per mesh axis with sharded gradients, and one of two numbers
        over a pipeline.
    """
    if max_norm is not None and not max_norm > 0.0:
        raise ConfigError(f"max_norm={max_norm} must be above 0, or None for no clipping.")
    pipeline, elsewhere = None, set()
    if isinstance(parameters, nn.Module):
        pipeline = pipeline_of(parameters)
        if pipeline is not None:
            named = dict(parameters.named_parameters())
            elsewhere = {id(named[name]) for name in pipeline.copied}
        parameters = parameters.parameters()
    parameters = [p for p in parameters if p.requires_grad]
    if parameters:
        device = local_tensor(parameters[0]).device
    elif pipeline is not None:
        device = torch.device(pipeline.mesh.device_type)  # other stages may have trained parameters
    else:
        return torch.zeros(())
    # Norms of local gradients; parameters shared by pipeline stages count once.
    buckets: dict[Any, list[Tensor]] = {}
    gradients: dict[Any, list[Tensor]] = {}
    for parameter in parameters:  # not by gradient, so that all processes have the same buckets
        key = _sharded_over(parameter)
        bucket = buckets.setdefault(key, [])
        left = offloaded_gradient(parameter)
        if left is None and parameter.grad is not None:
            _sharded_over(parameter.grad)  # raises for a gradient that is not reduced yet
        if id(parameter) in elsewhere:
            continue
        if left is not None:
            bucket.append(left.norm())
        elif parameter.grad is not None:
            gradients.setdefault(key, []).append(local_tensor(parameter.grad))
    for key, tensors in gradients.items():
        buckets[key] += _norms(tensors)
    total = _sum_squares(buckets, device)
    wide = any(norm.dtype == torch.float64 for bucket in buckets.values() for norm in bucket)
    if pipeline is not None:
        both = torch.stack([total, total.new_tensor(wide)])
        dist.all_reduce(both, group=pipeline.group)
        total, wide = both[0], bool(both[1])
    total = total.sqrt()
    coefficient = 1.0 if max_norm is None else float(max_norm / (total + 1e-6))
    if coefficient < 1.0:
        _scale_gradients_(parameters, coefficient)
    return total if wide else total.float()


def _sum_squares(buckets: Mapping[Any, Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return the sum of squared gradient norms, each all-reduced over the axes that shard it."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key, bucket in buckets.items():
        square = torch.zeros_like(total)
        if bucket:
            norms = torch.stack([norm.to(device, torch.float64) for norm in bucket])
            square = norms.square().sum()
        if key is not None:
            mesh, axes = key
            for axis in axes:
                dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    return total


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each gradient, in float32 or wider, with few kernel launches."""
    norms: list[Tensor] = []
    for same_kind in _by_kind(gradients):
        norms += torch._foreach_norm(same_kind, 2, dtype=accumulation_dtype(same_kind[0].dtype))
    return norms


def _scale_gradients_(parameters: Iterable[Tensor], coefficient: float) -> None:
    gradients = []
    for parameter in parameters:
        left = offloaded_gradient(parameter)
        if left is not None:
            left.scale_(coefficient)
        elif parameter.grad is not None:
            gradients.append(local_tensor(parameter.grad))
    for same_kind in _by_kind(gradients):
        torch._foreach_mul_(same_kind, coefficient)


def _sharded_over(tensor: Tensor) -> Any:
    """Return (mesh, axes on which the tensor is sharded), or None for a replicated tensor."""
    if not isinstance(tensor, DTensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise DistributedError(
            f"a gradient has placements={tensor.placements}, so it has not been reduced. Reduce "
            "gradients before clip_grad_norm_."
        )
    axes = tuple(i for i, p in enumerate(tensor.placements) if not isinstance(p, Replicate))
    return (tensor.device_mesh, axes) if axes else None


def _by_kind(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by device and dtype, as the foreach operations require."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds.values()
