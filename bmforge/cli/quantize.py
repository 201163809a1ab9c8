"""`bmforge quantize`: writes a quantized model, and optionally reports the loss of quality."""

from __future__ import annotations

import statistics
from dataclasses import replace

from bmforge.cli.options import QuantizeCommand
from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.host_tuning import warn_if_busy
from bmforge.models.integer_weights import KEEP
from bmforge.models.quantize import quantize_directory
from bmforge.nn.packing import QuantSpec, find_preset
from bmforge.recipes.adapter_dirs import merged_model
from bmforge.recipes.evaluate import EvaluateConfig, evaluate_model
from bmforge.recipes.quantized_layers import measure_layers

__all__ = ["run_quantize"]

_MOST_LAYERS = 5


def run_quantize(command: QuantizeCommand) -> None:
    """Quantize the weights of a model to packed integers and save it."""
    if command.max_file_gb <= 0:
        raise ConfigError(
            f"max_file_gb={command.max_file_gb} must be above 0. Pass the largest size of a "
            "weight file in GB."
        )
    spec = _find_scheme(command)
    if command.report:
        EvaluateConfig(text=command.report).check()
    warn_if_busy()
    with merged_model(command.source, command.target) as source:
        target = quantize_directory(
            source,
            command.target,
            spec,
            dtype=None if command.dtype is None else parse_dtype(command.dtype),
            max_file_bytes=int(command.max_file_gb * 1e9),
            allow_unknown=command.allow_unknown,
        )
        if command.report:
            print("\n".join(_compare(str(source), str(target), command.report)))
            print("\n".join(_name_layers(str(source), str(target), command.report)))


def _find_scheme(command: QuantizeCommand) -> str | QuantSpec:
    if command.scheme == KEEP:
        if command.outlier_ratio or command.float_activations:
            raise ConfigError(
                "outlier_ratio and float_activations have no effect with scheme='keep', which "
                "copies the quantized weights. Leave them out."
            )
        return KEEP
    spec = replace(find_preset(command.scheme), outlier_ratio=command.outlier_ratio)
    return replace(spec, activations="float") if command.float_activations else spec


def _compare(before: str, after: str, texts: tuple[str, ...]) -> list[str]:
    """Return one text line per metric, with the values before and after quantization."""
    config = EvaluateConfig(text=texts)
    was, now = evaluate_model(before, config), evaluate_model(after, config)
    return [
        f"{metric}  {text}  {value:.4f} -> {now[metric][text]:.4f} "
        f"({100 * (now[metric][text] / value - 1):+.2f} %)"
        for metric, values in was.items()
        for text, value in values.items()
    ]


def _name_layers(before: str, after: str, texts: tuple[str, ...]) -> list[str]:
    """Return lines with the median quantization error, and the layers with the largest errors."""
    layers = measure_layers(before, after, texts)
    median = statistics.median(layer.error for layer in layers)
    width = max(len(layer.name) for layer in layers[:_MOST_LAYERS])
    return [
        (
            f"quantization changes the outputs of {len(layers)} layers by {median:.3%} "
            "(median); the largest changes:"
        ),
        *(f"  {layer.name:{width}}  {layer.error:.3%}" for layer in layers[:_MOST_LAYERS]),
    ]
