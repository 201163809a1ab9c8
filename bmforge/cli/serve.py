"""`bmforge serve MODEL`: an OpenAI-compatible server with a chat page."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bmforge.cli.open_model import (
    base_options,
    delta_names,
    find_names,
    open_with_adapters,
    put_deltas_,
    put_named_deltas_,
    with_file_scheme,
    with_own_adapter,
)
from bmforge.cli.serve_context import Context, choose_context
from bmforge.cli.serve_options import ServeCommand
from bmforge.device import find_devices
from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.host_tuning import warn_if_busy
from bmforge.infer.engine import Engine, EngineConfig, RequestsConfig
from bmforge.infer.engine.budget import check_budgets
from bmforge.infer.engine.native_step import load_step
from bmforge.infer.engine.runtime_adapters import load_adapter_
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.recipes.adapter_dirs import ModelSource, find_source
from bmforge.tokenizers import AutoTokenizer

__all__ = ["run_serve"]

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run_serve(command: ServeCommand) -> None:
    """Serve a model until the process is stopped.

    Raises:
        MissingDependencyError: the extra `serve` is not installed.
        ConfigError: two settings conflict.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, "serve", "bmforge serve")
    from bmforge.provenance import read_provenance
    from bmforge.serve.auth import load_admin_key, load_keys
    from bmforge.serve.idle_unloading import IdleUnloadingEngine
    from bmforge.serve.lifecycle import bind_address, serve

    _check(command)
    find_names(command.adapter)
    load_keys(command.config, os.environ)
    load_admin_key(command.config, os.environ)
    source = find_source(command.model)
    memory = with_file_scheme(command.memory, source.model)
    command = replace(command, memory=memory)
    with_own_adapter(source, command.adapter)
    budget = memory.budget_bytes
    with ExitStack() as stack:
        listener = stack.enter_context(bind_address(command.config))
        embedder = None
        if command.embedding_model is not None:
            directory = find_model(command.embedding_model)
            embedder = stack.enter_context(Engine(directory, device_budget_bytes=budget))
            budget = None if budget is None else budget - embedder.plan.used_bytes
        engine: Engine | IdleUnloadingEngine
        if command.unload_after_s is None:
            engine = _open_engine(command, source, budget)
        else:
            engine = IdleUnloadingEngine(
                lambda: _open_engine(command, source, budget), source.model, command.unload_after_s
            )
        stack.enter_context(engine)
        if any(device.type == "cpu" for device in find_devices(memory.device_names)):
            warn_if_busy()
            load_step()  # compiled now, so that the first request does not wait
        console = Console(file=sys.stderr)
        console.print(engine.plan.table())
        provenance = read_provenance(source.adapter or source.model)
        if provenance.license:
            console.print(f"license: {provenance.license}", markup=False)
        names = delta_names(find_names(command.adapter))
        load = partial(
            load_adapter_,
            allow_other_base=command.allow_other_base,
            base_directory=source.model,
        )
        serve(engine, command.config, source.tokenizer, embedder, listener, names, load)


def _check(command: ServeCommand) -> None:
    """Raise `ConfigError` for conflicting options, before any file is read."""
    memory = command.memory
    if command.context is not None and memory.max_model_len is not None:
        raise ConfigError(
            "context and max_model_len both set the maximum sequence length. Leave one of them out."
        )
    if command.unload_after_s is not None and not 0 < command.unload_after_s < float("inf"):
        raise ConfigError(f"unload_after_s={command.unload_after_s} must be above 0.")
    if command.config.access.allow_runtime_lora_updating:
        planned = {
            "unload_after_s": command.unload_after_s,
            "device_budget": memory.budget_bytes,
            "devices": memory.devices,
        }
        for name, value in planned.items():
            if value is not None:
                raise ConfigError(
                    f"allow_runtime_lora_updating and {name}={value} cannot be used together, "
                    "because memory is reserved only for adapters that are loaded at the start. "
                    "Leave one out, or pass the adapters with --adapter NAME=DIR."
                )


def _open_engine(command: ServeCommand, source: ModelSource, budget: int | None) -> Engine:
    """Create the engine of the served model."""
    directory, tokenizer = source.model, AutoTokenizer.from_pretrained(source.tokenizer)
    command = replace(command, adapter=with_own_adapter(source, command.adapter))
    quantize = command.memory.quantize
    is_planned = budget is not None or command.memory.devices is not None
    context = _find_context(command, source, budget, is_planned)
    config = EngineConfig(
        max_rows=command.max_num_seqs if is_planned else 1,
        only_requests=True,
        max_tokens=context.tokens,
        requests=RequestsConfig(
            max_num_seqs=command.max_num_seqs,
            total_tokens=context.total_tokens,
            use_speculation=command.speculate,
            draft=command.draft,
        ),
    )
    put_ = partial(_put_deltas_, command, directory)
    if is_planned:
        return open_with_adapters(
            directory, command.memory, budget, command.adapter, put_, config, tokenizer
        )
    backend = command.memory.backend
    if not command.adapter and quantize is None:
        return Engine(directory, tokenizer=tokenizer, config=config, backend=backend)
    # The model is quantized in memory, because the engine would first write the quantized weights
    # to a directory.
    model = AutoModel.from_pretrained(directory, quantize=quantize, backend=backend)
    if command.adapter:
        put_(model)
    return Engine(model.eval(), tokenizer=tokenizer, config=config)


def _find_context(
    command: ServeCommand, source: ModelSource, budget: int | None, is_planned: bool
) -> Context:
    """Return the maximum sequence length, and log it together with the reason."""
    requested = command.memory.max_model_len if command.context is None else command.context
    described = AutoModel.describe_pretrained(source.model, backend=command.memory.backend)[0]
    devices = find_devices(command.memory.device_names)
    room = check_budgets(devices, budget, None)[0]
    context = choose_context(described, requested, room, command.max_num_seqs, is_planned)
    if context.tokens is not None:
        get_logger().info("context: %d tokens (%s)", context.tokens, context.reason)
    return context


def _put_deltas_(command: ServeCommand, directory: Path, model: Any) -> None:
    """Attach the adapters of `--adapter`, for all requests or for requests that select them."""
    named = find_names(command.adapter)
    check = base_options(model, directory, command.allow_other_base)
    if named:
        put_named_deltas_(model, named, **check)
    else:
        put_deltas_(model, command.adapter, **check)
