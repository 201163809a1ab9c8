"""Tensor and sequence parallelism: every block's projections are sharded over processes.

Parameters become DTensors on the `tp` axis, so that initialization, loading, saving and ZeRO know
their placement. Computation uses the local shards and explicit collectives (`collectives.py`), one
at the start and one at the end of each sublayer (attention or MLP). With sequence parallelism the
tokens between sublayers are sharded as well.

Source: Shoeybi et al., "Megatron-LM" (2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bmforge.errors import BmforgeError
from bmforge.nn.dense_weight import is_conv1d
from bmforge.parallel.tensor.foreign import FOREIGN_STYLES, supports_foreign_style
from bmforge.parallel.tensor.parts import APPLY, TensorGroup, hide_bias, is_mixture, view_here
from bmforge.parallel.tensor.sequence import divide_tokens_
from bmforge.surgery import View, match_names, view_parameters_

__all__ = [
    "SHARD_DIMS",
    "ShardingRule",
    "apply_tensor_parallel_",
    "match_sharding_rules",
    "tensor_problems",
]


class ShardingRule(Protocol):
    """Sharding style of the modules that match a glob; see `models.TensorParallelRule`."""

    @property
    def glob(self) -> str:
        """Name glob of the modules."""

    @property
    def style(self) -> str:
        """Sharding style, such as "column" or "row"."""

    @property
    def units(self) -> int:
        """Number of indivisible units, such as attention heads."""


# Sharding style -> parameter -> sharded dim. Other parameters are replicated.
SHARD_DIMS: dict[str, dict[str, int]] = {
    "part": {},
    "whole": {},
    "column": {"weight": 0, "bias": 0},
    "key_value": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "bias": {"weight": 1},
    "head_norm": {},
    "gate": {},
    "embedding": {"weight": 0},
    "head": {"weight": 0, "bias": 0},
    "own_column": {"weight": 0, "bias": 0},
    "gathered_column": {"weight": 0, "bias": 0},
    "split_row": {"weight": 1},
    "shared_tail": {},
    "experts": {"gate_proj": 1, "up_proj": 1, "down_proj": 2, "gate_bias": 1, "up_bias": 1},
}


def tensor_problems(model: nn.Module, rules: Sequence[ShardingRule], size: int) -> list[str]:
    """Return the reasons why tensor parallelism over `size` processes is impossible."""
    if size == 1:
        return []
    if not rules:
        return [f"tp={size}: {type(model).__name__} has no tensor-parallel rules"]
    problems, modules = [], dict(model.named_modules())
    for rule in rules:
        try:
            names = match_names(modules, (rule.glob,))
        except BmforgeError as error:
            problems.append(f"tensor_parallel: {error}")
            continue
        if rule.style not in SHARD_DIMS:
            problems.append(f"tensor_parallel: {rule.glob} has the unknown style {rule.style!r}")
            continue
        shares = rule.style == "key_value" and rule.units and size % rule.units == 0
        if rule.units % size and not shares and rule.style != "shared_tail":
            kind = "columns" if rule.style in ("gathered_column", "split_row") else "heads"
            problems.append(f"tp={size} does not divide the {rule.units} {kind} of {rule.glob}")
        if rule.style in FOREIGN_STYLES:
            problems += [
                (
                    f"tp={size}: {name} is a {type(modules[name]).__name__}, which does not "
                    f"support the style {rule.style!r} (only layers of floats or int8 rows do)"
                )
                for name in names
                if not supports_foreign_style(modules[name], rule.style)
            ]
        reasons = {getattr(modules[name], "unsharded_reason", "") for name in names} - {""}
        problems += [f"tp={size}: {rule.glob}: {reason}" for reason in sorted(reasons)]
        problems += [
            (
                f"tp={size}: {name}.{key} of shape {tuple(parameter.shape)} is too small to be "
                "sharded"
            )
            for name in names
            for key, parameter in modules[name].named_parameters(recurse=False)
            if _leaves_empty(parameter, _dims_of(modules[name], rule).get(key), size) and not shares
        ]
    return problems or _part_problems(model, match_sharding_rules(model, rules), size)


def _part_problems(model: nn.Module, styles: Mapping[str, ShardingRule], size: int) -> list[str]:
    """Return the reasons why adapters cannot be sharded like their base modules."""
    problems = []
    for name, module in model.named_modules():
        if not follows_base(module):
            continue
        rule, supported = _rule_around(name, module, styles), module.sharding_styles
        style = "" if rule is None else rule.style
        if style not in supported:
            problems.append(
                f"tp={size}: {name} ({type(module).__name__}) is attached to a module that is "
                f"sharded in the style {style!r}, but supports only "
                f"{', '.join(map(repr, sorted(supported - {''})))}"
            )
        elif rule is not None:
            problems += [
                (
                    f"tp={size}: {name}.{key} of shape {tuple(parameter.shape)} is too small to "
                    "be sharded"
                )
                for key, parameter in module.named_parameters(recurse=False)
                if _leaves_empty(parameter, _dims_of(module, rule).get(key), size)
            ]
    return problems


def follows_base(module: Any) -> bool:
    """Return True for an adapter that is sharded like its base module."""
    return callable(getattr(module, "tensor_notes", None)) and hasattr(module, "sharding_styles")


def _rule_around(
    name: str, module: nn.Module, styles: Mapping[str, ShardingRule]
) -> ShardingRule | None:
    """Return the sharding rule of a module; an adapter has that of its base module.

    The parameters of a base module with the style "whole" are replicated, as without a rule.
    """
    if not follows_base(module):
        return styles.get(name)
    rule = styles.get(name.rpartition(".")[0])
    return None if rule is not None and rule.style == "whole" else rule


def _dims_of(module: Any, rule: ShardingRule | None) -> Mapping[str, int]:
    """Return the sharded dim of each parameter, from the style or an adapter's `tensor_notes`."""
    if rule is None:
        return {}
    if not callable(getattr(module, "tensor_notes", None)):
        dims = SHARD_DIMS[rule.style]
        turned = is_conv1d(module) and "weight" in dims
        return {**dims, "weight": 1 - dims["weight"]} if turned else dims
    notes = {key: note.shard_dims.get(rule.style) for key, note in module.tensor_notes().items()}
    return {k: v for k, v in {**SHARD_DIMS[rule.style], **notes}.items() if v is not None}


def _leaves_empty(parameter: Tensor, dim: int | None, size: int) -> bool:
    """Return True if chunking `dim` into `size` parts leaves some rank without elements."""
    if dim is None:
        return False
    length = parameter.shape[dim]
    # A DTensor is sharded into parts of ceil(length / size): 5 rows on 4 ranks are 2, 2, 1 and 0.
    return -(-length // size) * (size - 1) >= length


def match_sharding_rules(
    model: nn.Module, rules: Sequence[ShardingRule]
) -> dict[str, ShardingRule]:
    """Return a dict from module name to rule; if several globs match, the last rule applies."""
    names = [name for name, _ in model.named_modules()]
    return {name: rule for rule in rules for name in match_names(names, (rule.glob,))}


def apply_tensor_parallel_(
    model: nn.Module,
    styles: Mapping[str, ShardingRule],
    stacks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    sequence: bool = False,
) -> None:
    """Shard a model over the axis `tp`, in place.

    Args:
        model: unsharded model.
        styles: dict from module name to `ShardingRule`; see `match_sharding_rules`.
        stacks: containers of blocks (a stack runs its blocks one after the other).
        mesh: one-dimensional mesh.
        sequence: shard the tokens between sublayers as well (sequence parallelism).

    Comm: per sublayer (attention or MLP) one all-reduce of the hidden states forward and one
        backward; with `sequence`, an all-gather and a reduce-scatter each way instead. The
        embedding needs one all-reduce forward, the head one backward.
    """
    tensor, whole_group = TensorGroup(mesh), TensorGroup(mesh)
    blocks = {id(module) for stack in stacks for module in stack.modules()}
    mixtures = tuple(
        f"{n}."
        for n, module in model.named_modules()
        if n in styles and (is_mixture(module) or styles[n].style == "whole")
    )
    new: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        rule = _rule_around(name, module, styles)
        # Inside a mixture of experts, or a replicated sublayer, each process has all tokens;
        # outside, only its own tokens.
        is_next_to = follows_base(module) and f"{name.rpartition('.')[0]}." in mixtures
        inside = name.startswith(mixtures) and not is_next_to
        group = whole_group if inside else tensor
        has_all = inside or f"{name}." in mixtures
        between = group.view_between if id(module) in blocks and not has_all else view_here
        views = dict(_shard_parameters_(module, rule, group, between, new))
        if rule is not None and rule.style in FOREIGN_STYLES and not follows_base(module):
            FOREIGN_STYLES[rule.style](module, group, rule.units)
        elif rule is not None and rule.style in APPLY and not follows_base(module):
            APPLY[rule.style](module, group)
        if views:
            view_parameters_(module, views, "views")
    if any(rule.style in FOREIGN_STYLES for rule in styles.values()):
        _view_parameters_of_children_(model)
    if sequence:
        for stack in stacks:
            divide_tokens_(stack, tensor)


def _view_parameters_of_children_(model: nn.Module) -> None:
    """Let modules of other libraries read a child's replicated parameter as a local tensor.

    A Mamba mixer, for instance, reads the weight of its convolution without calling it. Blocks (the
    items of a ModuleList) are skipped, because ZeRO gathers their parameters only while they run.
    """
    for module in list(model.modules()):
        views = {
            f"{name}.{key}": view_here
            for name, child in _near_modules(module)
            for key, parameter in child.named_parameters(recurse=False)
            if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate()
        }
        if views:
            view_parameters_(module, views, "child views")


def _near_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each child and grandchild, except the items of lists."""
    lists = (nn.ModuleList, nn.ModuleDict)
    if isinstance(module, lists):
        return
    for name, child in module.named_children():
        yield name, child
        if not isinstance(child, lists):
            yield from ((f"{name}.{key}", other) for key, other in child.named_children())


def _shard_parameters_(
    module: nn.Module,
    rule: ShardingRule | None,
    tensor: TensorGroup,
    between: View,
    new: dict[int, nn.Parameter],
) -> Iterator[tuple[str, View]]:
    """Turn a module's own parameters into DTensors; yield each name and its local view."""
    dims = _dims_of(module, rule)
    # An adapter attached to a replicated module, such as an unsharded MLP, is used like its base.
    is_sharded = rule is not None and bool(SHARD_DIMS[rule.style])
    # `follows`: replicated tensors of which each process uses those of its heads or columns. This
    # includes a prefix, but not an embedding's adapter, whose result is replicated.
    follows = rule is not None and (
        rule.style in ("head_norm", "gate")
        or (is_sharded and follows_base(module) and rule.style != "embedding")
        or (rule.style == "key_value" and hasattr(module, "tensor_notes"))
    )
    shared = rule is not None and rule.style == "key_value" and bool(rule.units % tensor.size)
    for key, parameter in list(module.named_parameters(recurse=False)):
        takes_share = shared and dims.get(key) == 0
        dim = None if shared else dims.get(key)
        if id(parameter) not in new:
            placement = Replicate() if dim is None else Shard(dim)
            new[id(parameter)] = _distribute(parameter, tensor.mesh, placement)
        # Tied parameters stay one object.
        module._parameters[key] = new[id(parameter)]
        if dim is not None:
            yield key, view_here
        elif takes_share and rule is not None:
            yield key, partial(tensor.view_shared_head, rule.units)
        elif follows and parameter.is_floating_point():
            # Replicated, and used by each process for its own heads or columns.
            yield key, tensor.view_of_heads
        elif rule is not None and rule.style in ("row", "split_row") and key == "bias":
            yield key, hide_bias
        else:
            yield key, between


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    """Return the parameter as a DTensor; all processes must have equal values."""
    data = parameter.detach()
    distributed = distribute_tensor(data, mesh, [placement], src_data_rank=None)
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)
