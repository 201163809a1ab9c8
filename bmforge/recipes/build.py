"""Builds the model of a run: applies the option `changes`, parallelizes and loads weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from bmforge.errors import ConfigError
from bmforge.memory.spill import SpillFile
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import Model, init_weights_, load_weights_, weight_initializer, weight_reader
from bmforge.models.changes import freeze_base_
from bmforge.models.config import read_config_file
from bmforge.models.hub import find_model
from bmforge.parallel import World, parallelize
from bmforge.recipes.adapters import adapter_stays, attach_adapter, find_base
from bmforge.recipes.base_weights import (
    check_base_dtype,
    fill_packed_,
    open_packed,
    quantize_base_,
    quantizes_base_on_load,
    store_frozen_,
)
from bmforge.recipes.compression_phases import attach_phase, check_phase, has_phase
from bmforge.recipes.start import family_of, with_changes
from bmforge.train.checkpoint import Base
from bmforge.tune.delta import Delta

__all__ = ["build_model", "check_build", "describe_model"]


def build_model(config: Any, world: World, mesh: DeviceMesh) -> tuple[Model, Any, Base | None]:
    """Build a run's parallelized model.

    Args:
        config: config of the run, with all defaults resolved.
        world: all processes of the run.
        mesh: device mesh of the layout.

    Returns:
        the model, its compression job (or None), and the base weights that checkpoints omit (or
        None).

    Raises:
        BmforgeError: options of the config conflict with each other or with the initial model.
    """
    check_build(config, world.size)
    sizes, start = with_changes(config), None
    if config.init_from is not None:
        start = find_model(config.init_from)
        sizes = config.model.replace(raw=read_config_file(start))
    model = family_of(sizes).from_config(sizes, device="meta")
    is_loaded = start is not None and (bool(config.changes) or has_phase(config))
    if is_loaded:
        _load_and_change_(model, start, config)
    packed = open_packed(model, start, config)
    if packed is not None:  # the reader needs a separate copy, which stays on meta
        model = copy.deepcopy(packed.model)
    job = attach_phase(model, config, mesh)
    adapter = _freeze_(model, config)
    base = find_base(model, config)
    streams = config.offload.weights
    if streams:
        _stream_(model, config, world, start)
    parallelize(
        model,
        config.layout,
        mesh=mesh,
        precision=config.train.precision,
        master_weights=config.train.master_weights,
        recompute=config.recompute and not streams,  # streamed blocks are recomputed anyway
        compile=config.compile,
        prefetch=config.prefetch,
        offload_activations=config.offload.activations,
    )
    if start is None:
        init_weights_(model, config.seed, device=world.device)
    elif packed is not None:
        fill_packed_(model, packed, world.device)
    elif not is_loaded:
        load_weights_(model, start, device=world.device, new_head=config.new_head)
    if adapter is not None:
        adapter.init_(config.seed)
    return model, job, base


def describe_model(config: Any) -> Model:
    """Build a run's model on the meta device, to check options and to estimate its memory.

    Raises:
        ConfigError: the adapter, `changes` or `freeze_base` do not fit the model.
    """
    sizes = with_changes(config)
    if config.init_from is not None:
        sizes = sizes.replace(raw=read_config_file(find_model(config.init_from)))
    model = family_of(sizes).from_config(sizes, device="meta")
    if quantizes_base_on_load(config):
        quantize_base_(model, config.base_dtype)
    _freeze_(model, config)
    return model


def check_build(config: Any, processes: int) -> None:
    """Raise `ConfigError` if options of the model's storage conflict with each other."""
    check_base_dtype(config)
    check_phase(config)
    if config.offload.target == "disk":
        SpillFile(config.offload.directory, 0).close()
    if config.offload.weights and config.changes:
        raise ConfigError(
            "offload.weights=True and --changes cannot be used together: blocks are loaded on "
            "demand, but --changes needs all weights at the start. Train without offload.weights, "
            "or start from a model that was saved with the changes."
        )
    if config.offload.weights and (processes > 1 or config.train.precision != "fp32"):
        raise ConfigError(
            "offload.weights=True needs one process and precision=fp32, not "
            f"{processes} processes and {config.train.precision}. Use layout.zero=3 to "
            "shard weights."
        )


def _freeze_(model: Model, config: Any) -> Delta | None:
    """Attach the run's adapter, and freeze what it does not train; return the adapter."""
    adapter = attach_adapter(model, config)
    store_frozen_(model, config)
    if not config.freeze_base:
        return adapter
    sizes: Any = model.config
    freeze_base_(model, sizes.heads[sizes.head].names if config.new_head else ())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "freeze_base=True leaves no parameter to train, because no adapter is attached to "
            f"a layer of this {type(model).__name__}. Use --adapter lora instead, or attach one "
            "with --changes, for example `low_rank`."
        )
    return adapter


def _load_and_change_(model: Model, start: Any, config: Any) -> None:
    """Load the whole initial model on every process, and apply the run's model changes.

    The weights are loaded first, because a change (`models.changes`) may compute new weights from
    the weights that it replaces.
    """
    load_weights_(model, start, device="cpu", new_head=config.new_head)
    for change in config.changes:
        model.change_(change, seed=config.seed)


def _stream_(model: Model, config: Any, world: World, start: Path | None) -> None:
    """Stream the blocks' weights from host memory or disk in training (`offload.weights`)."""
    drawn = weight_initializer(model, config.seed)
    read = drawn if start is None else weight_reader(model, start, new_head=config.new_head)
    stream_blocks_(model, read, device=world.device, stays=adapter_stays(model))
