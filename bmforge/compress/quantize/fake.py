"""Quantization-aware training: layers compute with the values of the quantized model.

The optimizer updates floating-point weights. `finish_` packs them into the inference storage
format, bit-identical to the values used in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bmforge.compress.matrices import Matrix, find_matrices
from bmforge.compress.method import MethodBase
from bmforge.compress.quantize.apply import check_widths, quantize
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.int8_product import int8_linear
from bmforge.compress.rounding import round_activations, round_weight
from bmforge.errors import ConfigError
from bmforge.nn.moe import Experts
from bmforge.nn.packing import QuantSpec
from bmforge.surgery import match_names, unwrap_forward_, wrap_forward_, wrappers_of

__all__ = ["FakeQuantize", "is_rounding"]

_PLACE = "rounding"


def is_rounding(module: nn.Module) -> bool:
    """Return True if `FakeQuantize` makes a layer compute with quantized values."""
    return any(order_key == _PLACE for order_key, _ in wrappers_of(module))


class FakeQuantize(MethodBase):
    """Fake-quantizes linear layers in training, and packs the weights at the end.

    For experts, only the weights are fake-quantized, not the activations. With ``training="none"``,
    training is unchanged, and `finish_` quantizes the weights.

    Args:
        config: quantization settings; the scheme must not be "auto" unless `specs` is given.
        batches: calibration batches for `finish_` with ``training="none"``.
        specs: dict from module name to scheme, if the schemes differ.
    """

    name = "quantize"

    def __init__(
        self,
        config: QuantizeConfig,
        batches: Sequence[Any] | None = None,
        specs: Mapping[str, QuantSpec] | None = None,
    ) -> None:
        if config.training != "none" and config.is_auto and specs is None:
            raise ConfigError(
                'training with scheme="auto" needs one scheme for each layer. Pass '
                "specs=choose_specs(...)."
            )
        self.config, self.batches, self.specs = config, batches, specs
        self._names: list[str] = []
        self._seen = _ComputeDtype()

    def attach_(self, model: nn.Module) -> None:
        """Wrap the layers so that they compute with quantized values.

        Raises:
            ConfigError: a glob matches nothing, weights are already quantized, or widths are
                not divisible by the scheme's group size.
        """
        if self.config.training == "none":
            return
        matrices = find_matrices(model, self.config.where)
        specs = {m.owner: self._spec_of(m.owner) for m in matrices}
        check_widths(matrices, specs)
        self._names = list(specs)
        rows = _cut_by_inputs(model)
        modules = {m.owner: m for m in matrices}
        for owner, matrix in modules.items():
            spec = specs[owner]
            _check_kind(matrix, self.config)
            if spec.group_size == 0 and owner in rows:
                matrix.module.unsharded_reason = (  # type: ignore[assignment]
                    "rows with one scale cannot be sharded along their columns in "
                    "training; use a scheme with groups, or tp=1"
                )
            wrap_forward_(matrix.module, self._wrapper(matrix, spec), _PLACE)

    def _spec_of(self, owner: str) -> QuantSpec:
        return self.config.used_spec if self.specs is None else self.specs[owner]

    def _wrapper(self, matrix: Matrix, spec: QuantSpec) -> Callable[..., Any]:
        if self.config.training == "fake":
            keys = ("gate_proj", "up_proj", "down_proj")
            used = keys if isinstance(matrix.module, Experts) else ("weight",)
            return partial(_run_fake, matrix.module, used, spec, self._seen)
        in_both = self.config.training == "int8-both"
        return partial(_run_int8, matrix.module, in_both, self._seen)

    def state_dict(self) -> dict[str, Any]:
        """Return the dtype in which weights were fake-quantized."""
        return {"dtype": None if self._seen.dtype is None else str(self._seen.dtype)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state_dict`."""
        name = state.get("dtype")
        self._seen.dtype = None if name is None else getattr(torch, name.removeprefix("torch."))

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Pack the weights; return results for the report."""
        if self.config.training == "none":
            quantize(model, self.config, batches=self.batches)
            return {"scheme": self.config.scheme, "method": self.config.method}
        for owner in self._names:
            module = model.get_submodule(owner)
            unwrap_forward_(module, _PLACE)
            module.__dict__.pop("unsharded_reason", None)
        dtype = self._seen.dtype
        if dtype in (torch.bfloat16, torch.float16):
            # The weights were rounded in this dtype during training.
            with torch.no_grad():
                for matrix in find_matrices(model, tuple(self._names)):
                    matrix.write_(matrix.read().to(dtype).to(matrix.read().dtype))
        specs = {owner: self._spec_of(owner) for owner in self._names}
        quantize(model, self.config, specs=specs)
        return {"scheme": self.config.scheme, "training": self.config.training}


class _ComputeDtype:
    """Records the dtype in which layers compute, which may differ from that of their parameters."""

    dtype: torch.dtype | None = None


def _run_fake(
    module: nn.Module,
    keys: Sequence[str],
    spec: QuantSpec,
    seen: _ComputeDtype,
    inner: Callable[..., Any],
    /,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    own = module._parameters
    weights = {key: own[key] for key in keys if own.get(key) is not None}
    is_turned = hasattr(module, "nf")
    group = _group_here(spec, module, weights)
    if spec.activations == "int8" and not isinstance(module, Experts):
        x = round_activations(x, group)
    try:
        for key, weight in weights.items():
            assert weight is not None
            seen.dtype = weight.dtype
            own[key] = round_weight(weight, spec, is_turned)  # type: ignore[assignment]
        return inner(x, *args, **kwargs)
    finally:
        own.update(weights)


def _group_here(spec: QuantSpec, module: nn.Module, weights: Mapping[str, Any]) -> int:
    """Return the group size for a local shard; raise an error if sharding splits a group."""
    for key, weight in weights.items():
        columns = weight.shape[0 if hasattr(module, "nf") else -1]
        if spec.group_size and columns % spec.group_size:
            raise ConfigError(
                f"{key} of a {type(module).__name__} has {columns} columns on this process, "
                f"which is not a multiple of group_size={spec.group_size}. Use a smaller "
                "group_size or a smaller tp."
            )
    return spec.group_of(columns)


def _run_int8(
    module: Any,
    in_both: bool,
    seen: _ComputeDtype,
    inner: Callable[..., Any],
    /,
    x: Tensor,
) -> Tensor:
    weight = module.weight.t() if hasattr(module, "nf") else module.weight
    seen.dtype = weight.dtype
    if isinstance(module, nn.Linear) or hasattr(module, "nf"):
        return int8_linear(x, weight, module.bias, in_both=in_both)
    # Layers of other classes may also scale their input or output, so only the product is replaced.
    with _Int8Products(weight, in_both) as products:
        y: Tensor = inner(x)
    if not products.count:
        raise ConfigError(
            f'training="int8-both" replaces F.linear, which {type(module).__name__} does not '
            'call with its weight. Exclude it from `where`, or use training="fake".'
        )
    return y


class _Int8Products(TorchFunctionMode):
    """Computes `F.linear` with one weight by int8 products.

    Args:
        weight: weight of the products.
        in_both: use int8 products in the backward pass as well.

    Attributes:
        count: number of products computed.
    """

    def __init__(self, weight: Tensor, in_both: bool) -> None:
        super().__init__()
        self.weight, self.in_both, self.count = weight, in_both, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute products with the weight in int8; run all other functions unchanged."""
        if func is F.linear and len(args) > 1 and _is_same(args[1], self.weight):
            self.count += 1
            return int8_linear(*args, **(kwargs or {}), in_both=self.in_both)
        return func(*args, **(kwargs or {}))


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors are the same object, or have the same shape and memory address."""
    return left is right or (left.shape == right.shape and left.data_ptr() == right.data_ptr())


def _check_kind(matrix: Matrix, config: QuantizeConfig) -> None:
    is_plain = not isinstance(matrix.module, (Experts, nn.Embedding)) and not hasattr(
        matrix.module, "applies_adapters"
    )
    if config.training.startswith("int8") and not is_plain:
        raise ConfigError(
            f"{matrix.owner} is a {type(matrix.module).__name__}, but "
            f"training={config.training!r} supports only linear layers of blocks. Exclude it "
            'from `where`, or use training="fake".'
        )
    if isinstance(matrix.module, nn.Embedding) or hasattr(matrix.module, "matrix"):
        raise ConfigError(
            f"{matrix.owner} is a {type(matrix.module).__name__}, but training supports only "
            "linear layers and experts. Exclude it from `where`, and quantize it afterwards."
        )


def _cut_by_inputs(model: Any) -> set[str]:
    """Return the names of layers that tensor parallelism splits along the input dim."""
    if not hasattr(model, "layout_rules"):
        return set()
    names = [name for name, _ in model.named_modules()]
    rules = model.layout_rules().tensor_parallel
    globs = [rule.glob for rule in rules if rule.style in ("row", "experts")]
    return set(match_names(names, globs))
