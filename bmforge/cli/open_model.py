"""Loads the model of a command, optionally quantized, with a memory budget or with adapters."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import safe_open

from bmforge.device import find_devices, is_host
from bmforge.errors import ConfigError
from bmforge.files import find_export
from bmforge.gguf_header import is_gguf
from bmforge.host_tuning import warn_if_busy
from bmforge.infer.engine import Engine, EngineConfig
from bmforge.models import AutoModel
from bmforge.models.file_fingerprint import fingerprint_of_files
from bmforge.models.formats.packed_config import read_raw_config
from bmforge.models.integer_weights import KEEP, layers_with_integers
from bmforge.models.load import weight_reader
from bmforge.recipes.adapter_dirs import ModelSource
from bmforge.settings import MemoryOptions
from bmforge.tune.delta import load_delta, use_deltas
from bmforge.tune.delta.files import is_delta_dir

__all__ = [
    "base_options",
    "delta_bytes",
    "delta_names",
    "find_names",
    "open_with_adapters",
    "opened_model",
    "put_deltas_",
    "put_named_deltas_",
    "with_file_scheme",
    "with_own_adapter",
]


def with_own_adapter(source: ModelSource, adapters: Sequence[str]) -> tuple[str, ...]:
    """Return all adapters that a command attaches.

    These are the model argument, if it is an adapter directory, and the values of `--adapter`.

    Args:
        source: the command's model argument, resolved.
        adapters: values of `--adapter`.

    Raises:
        ConfigError: the model argument is an adapter, and `--adapter` has NAME=DIR entries.
    """
    if source.adapter is None:
        return tuple(adapters)
    if find_names(adapters):
        raise ConfigError(
            f"{str(source.adapter)!r} is an adapter, so --adapter cannot add named adapters to "
            "it. Use the base model instead, and add this adapter with --adapter NAME=DIR."
        )
    return (str(source.adapter), *adapters)


def with_file_scheme(memory: MemoryOptions, directory: Path) -> MemoryOptions:
    """Return memory options with the quantization scheme of the model's file, if none is set.

    The integers of a GGUF, GPTQ, AWQ or compressed-tensors file are kept, because dequantized
    weights need two to eight times the memory, and decoding reads all of it for each token.

    Args:
        memory: memory limits of the model.
        directory: model directory or GGUF file.
    """
    if memory.quantize is None and memory.backend != "transformers" and _keeps_integers(directory):
        return replace(memory, quantize=KEEP)
    return replace(memory, quantize=None) if memory.quantize == "none" else memory


def _keeps_integers(directory: Path) -> bool:
    """Return True if bmforge's quantized layers can store the checkpoint's integer weights."""
    if not is_gguf(directory) and "quantization_config" not in read_raw_config(directory):
        return False
    plain, files = AutoModel.describe_pretrained(directory)
    if plain.keeps_foreign_cache or plain.config.changes:  # bmforge's files record their scheme
        return False
    return bool(layers_with_integers(plain, weight_reader(plain, files)))


def put_deltas_(model: Any, deltas: Sequence[str], *, trainable: bool = False, **base: Any) -> None:
    """Attach saved adapters to a model.

    Args:
        model: the base model.
        deltas: adapter directories; DIR=0.5 scales the adapter's output by 0.5.
        trainable: whether the adapters can be trained; otherwise they are frozen.
        base: options with which `load_delta` checks the base model; see `base_options`.

    Raises:
        ConfigError: a weight is not a number, or `load_delta` fails.
    """
    for number, option in enumerate(deltas):
        where, is_weighed, weight = option.rpartition("=")
        where = where if is_weighed else option
        where = str(find_export(where))
        delta = load_delta(model, where, name=f"delta{number}", trainable=trainable, **base)
        if is_weighed:
            try:
                delta.weigh_(float(weight))
            except ValueError:
                raise ConfigError(
                    f"--adapter {option!r}: the weight {weight!r} is not a number. Pass "
                    f"DIR=WEIGHT, such as {where}=0.5."
                ) from None


def base_options(model: Any, directory: Path, allow_other_base: bool) -> dict[str, Any]:
    """Return the options with which `load_delta` checks that a model is an adapter's base model.

    Args:
        model: model to which the adapter will be attached; may be quantized or streamed.
        directory: directory from which the model was loaded.
        allow_other_base: accept a base model with other weights.
    """
    read = partial(fingerprint_of_files, model, directory)
    return {"allow_other_base": allow_other_base, "base_fingerprint": read}


def find_names(deltas: Sequence[str]) -> dict[str, str]:
    """Return a dictionary from name to directory, for adapters given as NAME=DIR.

    Raises:
        ConfigError: only some adapters have a name, two have the same name, or a directory contains
            no adapter.
    """
    parts = [option.partition("=") for option in deltas]
    for option, (_, is_told, where) in zip(deltas, parts, strict=True):
        if is_told and not (_has_adapter(where) or _has_adapter(option) or _is_number(where)):
            raise ConfigError(
                f"--adapter {option!r}: {where!r} is neither a weight nor an adapter directory. "
                "Pass DIR, DIR=WEIGHT, or NAME=DIR."
            )
    named = [
        (name, str(find_export(where))) for name, _, where in parts if where and _has_adapter(where)
    ]
    if named and (len(named) < len(deltas) or len(dict(named)) < len(named)):
        raise ConfigError(
            f"--adapter {' '.join(deltas)}: some adapters have no name, or two have the same name. "
            "Name each of them differently (NAME=DIR), so that requests can select one; or name "
            "none of them, so that every request uses all of them."
        )
    return dict(named)


def _has_adapter(name: str) -> bool:
    """Return True for an adapter directory, or a run directory whose export is an adapter."""
    return is_delta_dir(find_export(name))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def put_named_deltas_(model: Any, named: Mapping[str, str], **base: Any) -> None:
    """Attach saved adapters to a model; each is active only for requests that select it.

    `delta_names` returns the adapters' names in the model, because user-defined names may be any
    string. `base` contains the options with which `load_delta` checks the base model; see
    `base_options`.
    """
    for name, inner in delta_names(named).items():
        load_delta(model, named[name], name=inner, trainable=False, **base)
    use_deltas(model, ())


def delta_names(named: Iterable[str]) -> dict[str, str]:
    """Return a dict from each user-defined adapter name to the name in the model."""
    return {name: f"delta{number}" for number, name in enumerate(named)}


def delta_bytes(deltas: Sequence[str]) -> int:
    """Return the bytes that saved adapters need in fp32, plus one eighth for their activations.

    Args:
        deltas: adapters as given by the user: DIR, DIR=WEIGHT, or NAME=DIR.
    """
    count = 0
    for directory in find_names(deltas).values() or (g.rpartition("=")[0] or g for g in deltas):
        for file in Path(find_export(directory)).glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
            count += sum(math.prod(shape) for shape in shapes)
    return 4 * count * 9 // 8


def open_with_adapters(
    directory: Path,
    memory: MemoryOptions,
    budget: int | None,
    deltas: Sequence[str],
    put_: Callable[[Any], None],
    config: EngineConfig,
    tokenizer: Any = None,
) -> Engine:
    """Load a model within a memory budget that also covers its adapters.

    The adapters stay resident while the model's blocks are streamed.

    Args:
        directory: model directory.
        memory: quantization scheme and devices.
        budget: memory budget of model and adapters in bytes (default: the free memory).
        deltas: adapters as given by the user; () for none.
        put_: function that attaches the adapters to the model.
        config: config of the engine.
        tokenizer: the model's tokenizer (default: that in its directory).

    Raises:
        ConfigError: the budget is too small for the model with its adapters, or an adapter does not
            fit the model.
    """
    memory = with_file_scheme(memory, directory)
    config = replace(config, adapter_bytes=delta_bytes(deltas))
    engine = Engine(
        directory,
        device_budget_bytes=budget,
        quantize=memory.quantize,
        devices=memory.device_names,
        tokenizer=tokenizer,
        config=config,
        backend=memory.backend,
    )
    try:
        if deltas:
            engine.model.takes_parts = True
            put_(engine.model)
    except BaseException:
        engine.close()
        raise
    return engine


@contextmanager
def opened_model(
    directory: Path,
    memory: MemoryOptions,
    max_rows: int = 1,
    deltas: Sequence[str] = (),
    allow_other_base: bool = False,
) -> Iterator[Any]:
    """Context manager that loads a model; with a memory budget, it logs how the memory is used.

    Args:
        directory: model directory.
        memory: memory limits of the model.
        max_rows: number of concurrent sequences that the memory budget must suffice for.
        deltas: adapter directories to attach; DIR=0.5 scales the adapter's output by 0.5.
        allow_other_base: accept adapters that were trained on a base model with other weights.

    Adapters stay in memory and count toward the budget.
    """
    if any(is_host(device) for device in find_devices(memory.device_names)):
        warn_if_busy()
    memory = with_file_scheme(memory, directory)
    quantize = memory.quantize

    def put_(model: Any) -> None:
        put_deltas_(model, deltas, **base_options(model, directory, allow_other_base))

    if memory.device_budget is None and memory.devices is None:
        model = AutoModel.from_pretrained(directory, quantize=quantize, backend=memory.backend)
        put_(model)
        yield model.eval()
        return
    config = EngineConfig(max_rows=max_rows, max_tokens=memory.max_model_len)
    with open_with_adapters(directory, memory, memory.budget_bytes, deltas, put_, config) as engine:
        Console(file=sys.stderr).print(engine.plan.table())
        yield engine.model
