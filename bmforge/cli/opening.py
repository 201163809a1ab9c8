"""Opening a model for a command: whole, within a budget of memory, its weights packed."""

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

from bmforge.errors import ConfigError
from bmforge.infer.engine import Engine, EngineConfig
from bmforge.models import AutoModel
from bmforge.recipes.adapter_dirs import ModelSource
from bmforge.settings import MemoryOptions
from bmforge.tune.delta import load_delta, use_deltas
from bmforge.tune.delta.files import is_delta_dir

__all__ = [
    "delta_bytes",
    "delta_names",
    "find_names",
    "open_beside",
    "opened_model",
    "put_deltas_",
    "put_named_deltas_",
    "with_own_adapter",
]


def with_own_adapter(source: ModelSource, adapters: Sequence[str]) -> tuple[str, ...]:
    """Return the adapters of a command: that of an adapter directory, and those of `--adapter`.

    Args:
        source: what the command's argument names.
        adapters: values of `--adapter`.

    Raises:
        ConfigError: the argument is an adapter, and `--adapter` names adapters by request.
    """
    if source.adapter is None:
        return tuple(adapters)
    if find_names(adapters):
        raise ConfigError(
            f"{str(source.adapter)!r} is an adapter, and --adapter names others for requests to "
            "choose. Give the base model, and this one as --adapter NAME=DIR as well."
        )
    return (str(source.adapter), *adapters)


def put_deltas_(
    model: Any, deltas: Sequence[str], allow_other_base: bool = False, trainable: bool = False
) -> None:
    """Put saved deltas beside a model.

    Args:
        model: the base.
        deltas: directories, with ``=WEIGHT`` behind or not.
        allow_other_base: its weights need not be those that the deltas were trained on.
        trainable: they can be trained on; else they are frozen with it.

    Raises:
        ConfigError: a weight that is no number; or see `load_delta`.
    """
    for number, given in enumerate(deltas):
        where, is_weighed, weight = given.rpartition("=")
        where = where if is_weighed else given
        delta = load_delta(
            model,
            where,
            name=f"delta{number}",
            allow_other_base=allow_other_base,
            trainable=trainable,
        )
        if is_weighed:
            try:
                delta.weigh_(float(weight))
            except ValueError:
                raise ConfigError(f"--adapter {given!r}: {weight!r} is no number.") from None


def find_names(deltas: Sequence[str]) -> dict[str, str]:
    """Return what `put_named_deltas_` takes: name -> directory, of deltas given as NAME=DIR.

    Raises:
        ConfigError: some have a name and some have not, two have the same, or a directory has none.
    """
    parts = [given.partition("=") for given in deltas]
    for given, (_, is_told, where) in zip(deltas, parts, strict=True):
        if is_told and not (is_delta_dir(where) or is_delta_dir(given) or _is_number(where)):
            raise ConfigError(
                f"--adapter {given!r}: {where!r} is neither a weight nor a directory with a delta. "
                "Give DIR, DIR=WEIGHT, or NAME=DIR."
            )
    named = [(name, where) for name, _, where in parts if where and is_delta_dir(where)]
    if named and (len(named) < len(deltas) or len(dict(named)) < len(named)):
        raise ConfigError(
            f"--adapter {' '.join(deltas)}: give each a name of its own (NAME=DIR), by which it is "
            "asked for, or none a name, so that all requests have them all."
        )
    return dict(named)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def put_named_deltas_(model: Any, named: Mapping[str, str], allow_other_base: bool = False) -> None:
    """Put saved deltas beside a model, switched off, for requests that choose them.

    In the model they are called as `delta_names` says, as names of people may be any text.
    """
    for name, inner in delta_names(named).items():
        load_delta(
            model, named[name], name=inner, allow_other_base=allow_other_base, trainable=False
        )
    use_deltas(model, ())


def delta_names(named: Iterable[str]) -> dict[str, str]:
    """Return name by which a delta is chosen -> its name in the model."""
    return {name: f"delta{number}" for number, name in enumerate(named)}


def delta_bytes(deltas: Sequence[str]) -> int:
    """Return what saved deltas take in memory, in fp32, and an eighth more for what they make.

    Args:
        deltas: directories as a person gives them: DIR, DIR=WEIGHT, or NAME=DIR.
    """
    count = 0
    for given in find_names(deltas).values() or (g.rpartition("=")[0] or g for g in deltas):
        for file in Path(given).glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
            count += sum(math.prod(shape) for shape in shapes)
    return 4 * count * 9 // 8


def open_beside(
    directory: Path,
    memory: MemoryOptions,
    budget: int | None,
    deltas: Sequence[str],
    put_: Callable[[Any], None],
    config: EngineConfig,
    tokenizer: Any = None,
) -> Engine:
    """Open a model in a budget with deltas beside it, which stay while its blocks come and go.

    Args:
        directory: of the model.
        memory: by which scheme it is packed, and its devices.
        budget: in bytes, for both; None takes what is free.
        deltas: directories as a person gives them, () for none.
        put_: puts them beside the model.
        config: of the engine.
        tokenizer: the model's tokenizer (default: the one in its directory).

    Raises:
        ConfigError: the budget is too small for both, or a delta does not fit.
    """
    config = replace(config, beside_bytes=delta_bytes(deltas))
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
    directory: Path, memory: MemoryOptions, max_rows: int = 1, deltas: Sequence[str] = ()
) -> Iterator[Any]:
    """Have a model for as long as it is needed; of a budget the plan is shown.

    Args:
        directory: of the model.
        memory: how much it may take.
        max_rows: rows that are planned for.
        deltas: directories of deltas that are put beside it, with ``=WEIGHT`` behind or not.

    Deltas stay in memory, and the budget holds for them, too.
    """
    quantize = memory.quantize
    put_ = partial(put_deltas_, deltas=deltas, allow_other_base=quantize is not None)
    if memory.device_budget is None and memory.devices is None:
        model = AutoModel.from_pretrained(directory, quantize=quantize, backend=memory.backend)
        put_(model)
        yield model.eval()
        return
    config = EngineConfig(max_rows=max_rows, max_tokens=memory.max_tokens)
    with open_beside(directory, memory, memory.budget_bytes, deltas, put_, config) as engine:
        Console(file=sys.stderr).print(engine.plan.table())
        yield engine.model
