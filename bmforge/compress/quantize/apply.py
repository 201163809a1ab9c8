"""Post-training quantization to the inference storage formats, with or without calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from bmforge.compress.batches import check_batches
from bmforge.compress.matrices import Matrix, find_matrices, warn_of_stacks
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.gptq import quantize_gptq_
from bmforge.compress.quantize.replace_layers import as_globs, by_spec
from bmforge.compress.quantize.scaling import quantize_scaled_
from bmforge.compress.sensitivity import choose_specs
from bmforge.errors import ConfigError
from bmforge.models.pack import quantize_
from bmforge.nn.packing import QuantSpec

__all__ = ["check_widths", "quantize"]


def quantize(
    model: nn.Module,
    spec: str | QuantSpec | QuantizeConfig = "int8",
    *,
    method: str | None = None,
    batches: Sequence[Any] | None = None,
    where: Sequence[str] = (),
    specs: Mapping[str, QuantSpec] | None = None,
) -> nn.Module:
    """Quantize the weights of any model in place; return the model.

    The linear layers and experts of the blocks are quantized; embeddings, heads, norms and routers
    keep floating-point weights. The layers are the same as after `models.pack.quantize_`: a bmforge
    model records the change in its config, so it can be saved, loaded and streamed.

    Args:
        model: bmforge, transformers or any other model, complete and in memory.
        spec: scheme name, `QuantSpec`, or complete config (default: "int8").
        method: "absmax", "smooth", "awq" or "gptq"; if None, that of the config, or "absmax".
        batches: calibration batches for all methods except "absmax", and for "auto": keyword
            arguments of the model's forward, or only token ids.
        where: name globs of modules; if empty, those of the config.
        specs: dict from module name to scheme, instead of one scheme for all modules.

    Raises:
        ConfigError: the scheme or method is unknown, a layer is already quantized or does not
            fit the scheme (the message lists schemes that fit), a glob matches nothing, or batches
            are missing, too few or empty.

    Memory: with calibration, the hidden states of the batches and the statistics of one block.
    """
    config = _config_of(spec, method, tuple(where))
    if config.is_calibrated and (specs is None or config.method != "absmax"):
        check_batches(batches)
    elif batches is not None:
        raise ConfigError(
            f"batches have no effect with method={config.method!r}. Leave batches out, or use "
            "'smooth', 'awq' or 'gptq'."
        )
    chosen = _choose_specs(model, config, batches, specs)
    if config.method == "gptq":
        quantize_gptq_(model, config, chosen, batches or ())
    elif config.method != "absmax":
        quantize_scaled_(model, config, chosen, batches or ())
    else:
        for scheme, names in by_spec(chosen).items():
            quantize_(model, scheme, where=as_globs(model, names))
    warn_of_stacks(model, config.where, "quantized")
    return model


def _config_of(
    spec: str | QuantSpec | QuantizeConfig, method: str | None, where: tuple[str, ...]
) -> QuantizeConfig:
    options: dict[str, Any] = {"method": method} if method is not None else {}
    options |= {"where": where} if where else {}
    if isinstance(spec, QuantizeConfig):
        clash = [name for name in options if getattr(spec, name) != options[name]]
        if clash:
            raise ConfigError(
                f"{clash[0]} is set both in the config and as an argument. Remove one of the two."
            )
        return spec
    if isinstance(spec, QuantSpec):
        return QuantizeConfig(spec=spec, **options)
    return QuantizeConfig(scheme=spec, **options)


def _choose_specs(
    model: nn.Module,
    config: QuantizeConfig,
    batches: Sequence[Any] | None,
    given_specs: Mapping[str, QuantSpec] | None,
) -> dict[str, QuantSpec]:
    """Return a dict from module name to scheme, after checking that each scheme fits.

    The result holds no references to modules.
    """
    matrices = find_matrices(model, config.where or tuple(given_specs or ()))
    if given_specs is not None:
        chosen = dict(given_specs)
    elif config.is_auto:
        assert config.average_bits is not None
        chosen = choose_specs(model, batches or (), config.average_bits, where=config.where)
    else:
        chosen = {matrix.owner: config.used_spec for matrix in matrices}
    check_widths(matrices, chosen)
    return chosen


def check_widths(matrices: Sequence[Matrix], specs: Mapping[str, QuantSpec]) -> None:
    """Raise one `ConfigError` that lists all matrices whose width does not fit their scheme."""
    problems = {}
    for matrix in matrices:
        part = matrix.parameter[matrix.index or 0] if matrix.parameter.dim() == 3 else None
        columns = matrix.read().shape[1] if part is None else part.shape[1]
        if problem := specs[matrix.owner].problem(columns):
            problems[matrix.owner] = problem
    if problems:
        lines = [f"{name}: {problem}" for name, problem in problems.items()]
        more = f" And {len(lines) - 3} more." if len(lines) > 3 else ""
        raise ConfigError(f"{'. '.join(lines[:3])}.{more} Exclude these layers from `where`.")
