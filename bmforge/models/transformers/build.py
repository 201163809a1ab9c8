"""Builds a transformers model without allocating its weights.

Matrices are on the meta device. Small tensors and all buffers that a constructor computes (rotary
tables, embedding scales, decay rates) are allocated, since no file contains their values.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bmforge.errors import ConfigError
from bmforge.models.transformers.library import AUTO_CLASSES, load_library, strict_error

__all__ = ["Built", "build_module", "find_class", "fit_config"]

# Larger tensors are not allocated when a model is built: 1 Mi fp32 elements are 4 MiB. This is the
# size of the largest useful buffer, a causal mask of 1,024 positions (GPT-2).
_MOST_ELEMENTS = 1 << 20
_ALLOCATE = {torch.empty, torch.rand, torch.randn, torch.Tensor}
_SAMPLE = {torch.rand, torch.randn}
_MOST_SAMPLED = 1 << 16
_FILL = {torch.zeros, torch.ones, torch.full}
_BUILD_ERRORS = (ImportError, ValueError, TypeError, RuntimeError, KeyError, AttributeError)


class _LargeOnMeta(TorchFunctionMode):
    """Mode that creates matrices and large tensors on the meta device; others normally."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Select the device of a new tensor; skip `nn.init` functions for meta tensors."""
        kwargs = dict(kwargs or {})
        if getattr(func, "__module__", None) == nn.init.__name__:
            target = args[0] if args else kwargs["tensor"]
            return target if target.is_meta else func(*args, **kwargs)
        if func in _ALLOCATE or func in _FILL:
            shape = _shape_of(args, kwargs)
            # Small random tensors may initialize a parameter (Zamba's time steps).
            is_sample = func in _SAMPLE and math.prod(shape) <= _MOST_SAMPLED
            is_matrix = len(shape) > 1 and func in _ALLOCATE and not is_sample
            if is_matrix or math.prod(shape) > _MOST_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    first = args[0] if args else kwargs.get("size", ())
    if isinstance(first, int):
        return tuple(a for a in args if isinstance(a, int))
    return tuple(first) if isinstance(first, (tuple, list)) else ()


class Built:
    """Transformers model on the meta device, and the values that its constructor computed.

    Args:
        module: model whose parameters and persistent buffers are on the meta device.
        values: mapping from the name of a parameter or persistent buffer to the initial value that
            the constructor computed; loading or `init_weights_` replaces it.
    """

    def __init__(self, module: Any, values: dict[str, Tensor]) -> None:
        self.module, self.values = module, values


def find_class(hf_config: Any, head: str) -> Any:
    """Return the transformers class for a config and a head.

    Raises:
        ConfigError: the architecture has no such head.
    """
    library = load_library()
    auto = getattr(library, AUTO_CLASSES[head][0])
    try:
        classes = auto._model_mapping[type(hf_config)]
    except KeyError:
        for name in getattr(hf_config, "architectures", None) or ():
            if isinstance(own := getattr(library, name, None), type):
                return own
        raise ConfigError(
            f"model_type={hf_config.model_type!r} has no head {head!r} in transformers. Choose "
            "another head."
        ) from None
    if isinstance(classes, (tuple, list)):
        preferred = getattr(hf_config, "architectures", None) or ()
        return next((c for c in classes if c.__name__ in preferred), classes[0])
    return classes


def fit_config(hf_config: Any, chosen: Any) -> Any:
    """Return the config that a model class expects: the text config if the class is text-only."""
    own = hf_config.sub_configs.get("text_config")
    return hf_config.get_text_config() if own and chosen.config_class is own else hf_config


def build_module(hf_config: Any, head: str, dtype: torch.dtype) -> Built:
    """Build the transformers model of a config on the meta device.

    Raises:
        ConfigError: transformers cannot build it, for example because it needs another library.
    """
    chosen = find_class(hf_config, head)
    try:
        with torch.random.fork_rng(devices=[]), _LargeOnMeta():
            torch.manual_seed(0)  # random vectors are equal on all processes
            module = chosen._from_config(fit_config(hf_config, chosen), dtype=dtype)
    except (*_BUILD_ERRORS, strict_error()) as error:
        raise ConfigError(
            f"transformers cannot build a {chosen.__name__} from this config: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}."
        ) from error
    module.tie_weights()
    return Built(module, {**_move_to_meta_(module), **_compute_unsaved(module)})


def _compute_unsaved(module: Any) -> dict[str, Tensor]:
    """Return the values of parameters that transformers computes instead of saving (Marian)."""
    values = {}
    for name in module._keys_to_ignore_on_save or ():
        stem, _, key = name.rpartition(".")
        owner = copy.deepcopy(module.get_submodule(stem)).to_empty(device="cpu")
        with torch.no_grad():
            module._init_weights(owner)
        values[name] = getattr(owner, key).detach()
    return values


def _move_to_meta_(module: nn.Module) -> dict[str, Tensor]:
    """Move parameters and persistent buffers to meta, keeping ties; return a dict of values."""
    values: dict[str, Tensor] = {}
    moved: dict[int, Any] = {}
    for prefix, owner in module.named_modules():
        before = f"{prefix}." if prefix else ""
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if not parameter.is_meta and before + key not in values and id(parameter) not in moved:
                values[before + key] = parameter.detach().clone()
            if not parameter.is_meta:
                new = moved.setdefault(
                    id(parameter),
                    nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad),
                )
                owner._parameters[key] = new
                moved[id(new)] = new
        for key, buffer in owner._buffers.items():
            if buffer is None or key in owner._non_persistent_buffers_set or buffer.is_meta:
                continue
            values[before + key] = buffer.detach().clone()
            owner._buffers[key] = buffer.to("meta")
    return values
