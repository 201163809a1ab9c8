"""Builds the frozen reference model of preference optimization, quantized or offloaded."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal

from torch import nn

from bmforge.align.reference import Reference, frozen_copy
from bmforge.device import default_device, is_host, parse_dtype
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models.config import read_config_file
from bmforge.models.hub import find_model
from bmforge.parallel import World, build_mesh, joined_world, parallelize
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.base_weights import cast_frozen_, fill_packed_, open_packed, quantize_base_
from bmforge.recipes.build import build_model
from bmforge.recipes.start import family_of, with_changes

__all__ = [
    "ReferenceDtype",
    "check_reference_copy",
    "describe_reference",
    "make_reference_copy",
    "open_reference_copy",
    "store_reference_",
]

ReferenceDtype = Literal["int8", "int4"]


def check_reference_copy(config: Any, is_copied: bool) -> None:
    """Raise `ConfigError` if an option of the reference copy has no effect or is not supported.

    Args:
        config: config of a run with ``reference_dtype`` and ``reference_offload``.
        is_copied: whether the run's reference is a copy.
    """
    options = {"reference_dtype": config.reference_dtype}
    options["reference_offload"] = config.reference_offload or None
    for name, value in options.items():
        if value is not None and not is_copied:
            raise ConfigError(
                f"{name}={value} has no effect, because the reference is not a copy of the model. "
                f"Add --reference copy, or leave {name} out."
            )
    if config.reference_offload and is_host(default_device()):
        raise ConfigError(
            "reference_offload=True has no effect on a CPU, whose memory is the host's. Leave it "
            "out; --reference-dtype int8 makes the reference smaller."
        )
    dtype = config.reference_dtype
    if dtype is None:
        return
    if config.init_from is None:
        raise ConfigError(
            f"reference_dtype={dtype!r} quantizes pretrained weights. Pass the directory or hub id "
            "of a model with --model."
        )
    if config.changes or config.layout.is_tensor_parallel:
        raise ConfigError(
            f"reference_dtype={dtype!r} does not support changes or layout.tp. Leave one out."
        )


def open_reference_copy(config: Any, rows: World) -> Reference:
    """Build a frozen copy of a run's initial model, in the layout of the policy.

    Args:
        config: config of the run, with all defaults resolved.
        rows: data-parallel rank and size of this process.
    """
    return frozen_copy(
        make_reference_copy(config, rows, config.reference_dtype),
        is_offloaded=config.reference_offload,
    )


def make_reference_copy(config: Any, rows: World, dtype: ReferenceDtype | None = None) -> nn.Module:
    """Build a second model with the initial weights of a run, in the layout of the policy.

    Args:
        config: config of the run, with all defaults resolved.
        rows: data-parallel rank and size of this process.
        dtype: dtype of the linear layers (default: that of the policy).
    """
    world, mesh = joined_world(rows), build_mesh(config.layout, rows.device)
    plain = dataclasses.replace(config, adapter=AdapterConfig(), base_dtype=None, freeze_base=False)
    if dtype is None:
        return build_model(plain, world, mesh)[0]
    return _build_quantized(plain, dtype, world, mesh)


def _build_quantized(config: Any, dtype: ReferenceDtype, world: World, mesh: Any) -> nn.Module:
    """Build the copy: linear layers in `dtype`, other layers in the run's precision."""
    start = find_model(config.init_from)
    sizes = config.model.replace(raw=read_config_file(start))
    model = family_of(sizes).from_config(sizes, device="meta")
    packed = open_packed(model, start, dataclasses.replace(config, base_dtype=dtype))
    assert packed is not None
    model = copy.deepcopy(packed.model)  # the reader needs a separate copy, which stays on meta
    _freeze_(model, config.train.precision)
    parallelize(
        model, config.layout, mesh=mesh, precision=config.train.precision, compile=config.compile
    )
    fill_packed_(model, packed, world.device)
    get_logger().info("the reference is a copy in %s", dtype)
    return model


def describe_reference(config: Any) -> nn.Module:
    """Build a run's quantized reference model on the meta device, to estimate its memory."""
    sizes = with_changes(config)
    model = family_of(sizes).from_config(sizes, device="meta")
    store_reference_(model, config.reference_dtype, config.train.precision)
    return model


def store_reference_(model: nn.Module, dtype: ReferenceDtype, precision: str) -> None:
    """Quantize a model on the meta device like the reference model, to estimate its memory."""
    quantize_base_(model, dtype)
    _freeze_(model, precision)


def _freeze_(model: nn.Module, precision: str) -> None:
    model.requires_grad_(False)
    cast_frozen_(model, parse_dtype(precision))
