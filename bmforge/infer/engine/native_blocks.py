"""Describes blocks for the C++ decoding step: pointers, sizes and kinds of their tensors.

A block that contains something unsupported (a hook, an unknown module class or child module, a
function set by a parallel layout) has no description; torch runs such a block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.infer.engine.native_adapters import find_low_ranks
from bmforge.infer.engine.native_structures import (
    AttentionPart,
    FeedPart,
    Layer,
    Matrix,
    Norm,
    Vector,
)
from bmforge.infer.engine.native_structures import (
    Experts as ExpertStacks,
)
from bmforge.nn import MLP, Attention, Block
from bmforge.nn.attention import compute_attention
from bmforge.nn.block import Residual
from bmforge.nn.linear import Linear
from bmforge.nn.low_rank import LowRank
from bmforge.nn.mlp import ACTIVATIONS, WideLinear
from bmforge.nn.moe import Experts, MoE, dispatch_locally
from bmforge.nn.norm import RMSNorm
from bmforge.nn.packing import QuantSpec
from bmforge.nn.part import join_parts
from bmforge.nn.prefix import KeyValuePrefix
from bmforge.nn.product_kernels import PLAIN_KINDS
from bmforge.nn.quantized import QuantizedExperts, QuantizedLinear
from bmforge.nn.shard_hooks import identity

__all__ = ["Watch", "describe_block", "expert_sizes"]

_PACKED = 3  # as `Kind` of rows.cpp
_NORMS: dict[type, int] = {RMSNorm: 1, nn.LayerNorm: 2}
_NORM_PLACES = {"pre": 0, "post": 1, "parallel": 2}
# As `Activation` of step_parts.cpp.
_ACTIVATIONS: dict[Callable[[Tensor], Tensor], int] = {
    F.gelu: 0,
    ACTIVATIONS["gelu_tanh"]: 1,
    F.relu: 2,
    F.silu: 3,
    torch.tanh: 4,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LINEARS = (nn.Linear, Linear, WideLinear, QuantizedLinear)
_EXPERTS = (Experts, QuantizedExperts)
# Forward functions at import: a class whose forward was patched is not supported.
_FORWARDS = {
    kind: kind.forward
    for kind in (
        Block,
        Residual,
        Attention,
        MLP,
        MoE,
        *_EXPERTS,
        RMSNorm,
        nn.LayerNorm,
        *_LINEARS,
        LowRank,
    )
}


class _UnknownError(Exception):
    """Raised if the C++ decoding step does not support a module."""


class Watch:
    """Records the state of the described modules, to detect later changes.

    The state is the class and all attributes of every module (hooks, children and parameters are
    attributes), and the address, size and dtype of every tensor.
    """

    def __init__(self) -> None:
        self._kinds: list[type] = []
        self._objects: list[nn.Module] = []
        self._modules: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._full: list[dict[str, Any]] = []
        self._inside: list[Any] = []
        self._tensors: list[Tensor] = []
        self._places: list[Any] = []
        self.adapted: list[tuple[LowRank, ...]] = []  # `Matrix.adapters` numbers them from 1
        self.prefixes: list[KeyValuePrefix] = []  # `AttentionPart.prefix` numbers them from 1
        self.kept: list[Any] = []  # keeps the memory behind raw pointers alive

    def add(self, module: nn.Module) -> None:
        """Record a module, its own tensors and its children."""
        attributes = vars(module)
        self._objects.append(module)
        self._kinds.append(type(module))
        self._modules.append(attributes)
        self._kept.append(dict(attributes))
        for key in ("_modules", "_parameters", *_HOOKS):
            (self._full if attributes[key] else self._empty).append(attributes[key])
            self._inside += attributes[key].values()
        tensors = [t for t in attributes["_parameters"].values() if t is not None]
        self._tensors += tensors
        self._places += _places(tensors)

    def sees_change(self) -> bool:
        """Return True if any recorded module or tensor changed.

        The check takes microseconds per block.
        """
        if any(self._empty) or _forwards_changed():
            return True
        if not all(map(is_, map(type, self._objects), self._kinds)):
            return True
        try:
            same = all(map(eq, self._modules, self._kept))
        except (RuntimeError, ValueError):  # a tensor attribute was replaced
            return True
        values = list(chain.from_iterable(map(dict.values, self._full)))
        same = same and len(values) == len(self._inside) and all(map(is_, values, self._inside))
        return not same or list(_places(self._tensors)) != self._places


def _places(tensors: list[Tensor]) -> Iterable[Any]:
    return zip(
        map(Tensor.data_ptr, tensors),
        map(_BYTES, tensors),
        map(_DTYPE, tensors),
        map(Tensor.is_contiguous, tensors),
        strict=True,
    )


_BYTES, _DTYPE = attrgetter("nbytes"), attrgetter("dtype")


def _forwards_changed() -> bool:
    forwards: dict[Any, Any] = _FORWARDS
    return any(kind.forward is not forward for kind, forward in forwards.items())


def describe_block(block: nn.Module, watch: Watch) -> Any:
    """Describe a block as a `Layer`; return None if the C++ decoding step does not support it.

    Args:
        block: block of a model.
        watch: records the block's modules, so that later changes of these modules are detected.
    """
    try:
        return _describe_block(block, watch)
    except _UnknownError:
        return None


def _record(module: Any, watch: Watch, kinds: Iterable[type], children: Iterable[str] = ()) -> None:
    """Record a module; raise `_UnknownError` if its class or children are not supported."""
    attributes = vars(module)
    kind: Any = type(module)
    is_known = kind in kinds and not _forwards_changed()
    # No instance attribute shadows the class: no patched method, no compiled forward.
    is_known = is_known and not module.training and not attributes.keys() & _defined_by(kind)
    is_known = is_known and not any(map(_has_other_hooks, map(attributes.get, _HOOKS)))
    if not is_known or any(module._modules[name] for name in module._modules.keys() - {*children}):
        raise _UnknownError
    watch.add(module)


def _has_other_hooks(hooks: dict[int, Any] | None) -> bool:
    """Return True if there are hooks other than the one that runs attached adapters."""
    return any(hook is not join_parts for hook in (hooks or {}).values())


@cache
def _defined_by(kind: type) -> frozenset[str]:
    return frozenset(dir(kind)) - {"is_delta", "adapter_weight"}


def _require(*conditions: bool) -> None:
    if not all(conditions):
        raise _UnknownError


def _address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor in host memory; None if there is no tensor."""
    if tensor is None:
        return None
    _require(type(tensor) in (Tensor, nn.Parameter), tensor.is_cpu, tensor.is_contiguous())
    return tensor.data_ptr()


def _describe_vector(tensor: Tensor | None) -> Any:
    if tensor is None:
        return Vector(None, 0)
    _require(tensor.dtype in PLAIN_KINDS)
    return Vector(_address(tensor), PLAIN_KINDS[tensor.dtype])


def _describe_norm(module: Any, watch: Watch) -> Any:
    if module is None:
        return Norm()
    _record(module, watch, _NORMS)
    _require(not getattr(module, "offset", 0.0))
    weight, bias = (_describe_vector(getattr(module, key, None)) for key in ("weight", "bias"))
    return Norm(weight, bias, module.eps, _NORMS[type(module)])


def _describe_matrix(module: Any, watch: Watch) -> Any:
    if module is None:
        return Matrix()
    parts = find_low_ranks(module)
    _record(module, watch, _LINEARS, parts)
    for part in parts.values():
        _record(part, watch, (LowRank,))
        _describe_vector(part.down), _describe_vector(part.up)
    if parts:
        watch.adapted.append((*parts.values(),))
    adapters = len(watch.adapted) if parts else 0
    bias = _describe_vector(module.bias)
    if not isinstance(module, QuantizedLinear):
        weight = module.weight
        _require(weight.dtype in PLAIN_KINDS)
        kind = PLAIN_KINDS[weight.dtype]
        numbers = {"kind": kind, "adapters": adapters}
        return Matrix(_address(weight), None, None, bias, *weight.shape, **numbers)
    _require(module.outlier_columns is None)
    spec: QuantSpec = module.spec
    packed, scales, minima = module.packed, module.scales, module.minima
    sizes = module.rows, module.columns, spec.group_of(module.columns)
    addresses = [_address(tensor) for tensor in (packed, scales, minima)]
    flags = spec.bits, spec.scale_type == torch.float32, spec.activations == "float"
    return Matrix(*addresses, bias, *sizes, _PACKED, *flags, adapters)


def _record_residual(block: Any, name: str, watch: Watch) -> Any:
    residual = getattr(block, f"{name}_residual")
    _record(residual, watch, (Residual,))
    return residual


def _describe_attention(block: Any, name: str, watch: Watch) -> Any:
    attn = getattr(block, name, None)
    if attn is None:
        return AttentionPart()
    projections = [f"{part}_proj" for part in "qkvo"]
    _record(attn, watch, (Attention,), (*projections, "q_norm", "k_norm", "prefix"))
    if attn.prefix is not None:
        _record(attn.prefix, watch, (KeyValuePrefix,))
        watch.prefixes.append(attn.prefix)
    prefix = len(watch.prefixes) if attn.prefix is not None else 0
    _require(
        attn.input_fn is identity,
        attn.memory_fn is identity,
        attn.attention_fn is compute_attention,
    )
    _require(attn.head_share == (0, 1), attn.rotary == "model")
    matrices = [_describe_matrix(getattr(attn, part), watch) for part in projections]
    _require(matrices[0].rows == attn.num_heads * attn.head_dim == matrices[3].columns)
    residual = _record_residual(block, name, watch)
    return AttentionPart(
        _describe_norm(getattr(block, f"{name}_norm"), watch),
        _describe_norm(attn.q_norm, watch),
        _describe_norm(attn.k_norm, watch),
        *matrices,
        *(attn.num_heads, matrices[1].rows // attn.head_dim, attn.head_dim),
        attn.head_dim**-0.5 if attn.scale is None else attn.scale,
        *(residual.in_scale, residual.out_scale),
        *(True, attn.causal, attn.rope_interleaved, 0, prefix),
    )


def _describe_feed(block: Any, watch: Watch) -> Any:
    mlp = block.mlp
    if mlp is None:
        return FeedPart()
    norm = _describe_norm(getattr(block, "mlp_norm", None), watch)
    residual = _record_residual(block, "mlp", watch)
    scales = residual.in_scale, residual.out_scale
    if type(mlp) is MoE:
        shared = mlp.shared_expert
        matrices = [Matrix()] * 3 if shared is None else _describe_mlp(shared, watch)
        _require(not any(matrix.adapters for matrix in matrices))
        _require(mlp.experts.activation in _ACTIVATIONS)
        numbers = True, mlp.experts.has_gate(), _ACTIVATIONS[mlp.experts.activation]
        return FeedPart(norm, *matrices, *scales, *numbers)
    matrices = _describe_mlp(mlp, watch)
    numbers = True, mlp.gate_proj is not None, _ACTIVATIONS[mlp.activation]
    return FeedPart(norm, *matrices, *scales, *numbers)


def _describe_mlp(mlp: Any, watch: Watch) -> list[Any]:
    """Return the descriptions of an MLP's gate, up and down matrices."""
    _record(mlp, watch, (MLP,), ("gate_proj", "up_proj", "down_proj"))
    _require(mlp.input_fn is identity, mlp.activation in _ACTIVATIONS)
    gate, up, down = (
        _describe_matrix(part, watch) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    alike = ("rows", "columns", "group", "kind", "keeps_floats")
    _require(mlp.gate_proj is None or all(getattr(gate, key) == getattr(up, key) for key in alike))
    return [gate, up, down]


def _describe_experts(mlp: Any, watch: Watch) -> Any:
    """Return the address of the struct for an MoE layer; None if `mlp` is not an MoE layer."""
    if type(mlp) is not MoE:
        return None
    _record(mlp, watch, (MoE,), ("router", "experts", "shared_expert", "shared_gate"))
    _require(mlp.input_fn is identity, mlp.output_fn is identity, mlp.dispatch is dispatch_locally)
    experts, shared = mlp.experts, mlp.shared_expert
    _record(experts, watch, _EXPERTS)
    _require(mlp.choice != "per_call", mlp.down_bias is None, experts.up_bias is None)
    _require(mlp.scoring == "softmax", mlp.groups == (1, 1), mlp.weight_scale == 1.0)
    if shared is not None:  # one struct describes both
        alike = shared.activation is experts.activation
        _require(alike, (shared.gate_proj is not None) == experts.has_gate())
    _require(not find_low_ranks(mlp.router), not find_low_ranks(mlp.shared_gate))
    stacks = {key: _describe_stack(experts, key) for key in ("gate_proj", "up_proj", "down_proj")}
    watch.kept += stacks.values()
    description = ExpertStacks(
        _describe_matrix(mlp.router, watch),
        _describe_matrix(mlp.shared_gate, watch),
        *(None if stack is None else ctypes.addressof(stack) for stack in stacks.values()),
        mlp.experts_per_token,
        *(mlp.normalize_weights, mlp.weighs and mlp.choice != "balanced"),
    )
    watch.kept.append(description)
    return ctypes.addressof(description)


def _describe_stack(experts: Any, key: str) -> Any:
    """Describe the weight named `key` of every expert; None if the experts do not have it."""
    sizes = experts.stack_sizes().get(key)
    if sizes is None:
        return None
    count, rows, columns = sizes
    if isinstance(experts, QuantizedExperts):
        stacks, spec = experts._tensors(f"{key}_"), experts.spec
        for stack in stacks:
            _address(stack)
        group = spec.group_of(columns)
        numbers = spec.bits, spec.scale_type == torch.float32, spec.activations == "float"
        return (Matrix * count)(
            *(
                Matrix(
                    *(None if stack is None else stack[number].data_ptr() for stack in stacks),
                    Vector(None, 0),
                    *(rows, columns, group, _PACKED),
                    *numbers,
                )
                for number in range(count)
            )
        )
    weight = getattr(experts, key)
    _require(weight.dtype in PLAIN_KINDS)
    begin, size = _address(weight), weight[0].nbytes
    kind = PLAIN_KINDS[weight.dtype]
    return (Matrix * count)(
        *(
            Matrix(begin + n * size, None, None, Vector(None, 0), rows, columns, kind=kind)
            for n in range(count)
        )
    )


def expert_sizes(layer: Any) -> dict[str, int] | None:
    """Return the buffer sizes of a described layer's experts; None if the layer has no experts."""
    if not layer.experts:
        return None
    experts = ExpertStacks.from_address(layer.experts)
    up = Matrix.from_address(experts.ups)
    return {
        "experts": experts.router.rows,
        "per_token": experts.per_token,
        "inner": experts.per_token * up.rows,
    }


def _describe_block(block: Any, watch: Watch) -> Any:
    parts = ("attn", "cross_attn", "mlp")
    children = (f"{part}_{kind}" for part in parts for kind in ("norm", "residual"))
    _record(block, watch, (Block,), (*parts, *children))
    attn, cross = (_describe_attention(block, name, watch) for name in parts[:2])
    _require(block.norm_place in _NORM_PLACES, not getattr(block.attn, "qk_norm_whole", False))
    feed, norm_place = _describe_feed(block, watch), _NORM_PLACES[block.norm_place]
    _require(norm_place != 2 or (not cross.exists and attn.exists and feed.exists))
    experts = _describe_experts(block.mlp, watch)
    return Layer(attn, cross, feed, experts, block.sum_scale, norm_place, 0)
