"""BMCook's file formats: int8 weights, pruned weights, and masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.bmcook.pruning import pruning_of
from bmforge.compress.quantize.fake import is_rounding
from bmforge.errors import CheckpointError, ConfigError
from bmforge.files import replace_atomically, replace_file
from bmforge.nn.int8 import quantize_rows
from bmforge.nn.low_rank import linear_sizes
from bmforge.parallel import run_on_first
from bmforge.shards import local_tensor, whole_tensor

__all__ = ["load_masks", "save", "save_masks"]

_MODES = ("quant", "prune")


def save(model: nn.Module, file_name: str, mode: str) -> None:
    """Write the weights of a compressed model.

    Args:
        model: trained model.
        file_name: path of the file to write.
        mode: "quant" replaces ``X.weight`` of each quantized layer with ``X.weight_quant``, int8
            (out, in), and ``X.weight_scale``, fp16 (out,); "prune" writes the remaining weights to
            the file (for blocks of a program's own class, all weights, with zeros), and their sizes
            to ``FILE.config.json``.

    Raises:
        ConfigError: `mode` is unknown, or the model was not compressed in this way.

    Comm: every process must call it.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} must be one of {', '.join(_MODES)}.")
    facts: dict[str, Any] | None = None
    if mode == "prune":
        pruning = pruning_of(model)
        if pruning is None:
            raise ConfigError(
                'mode="prune" needs a pruned model, but this model was not pruned. Prune the '
                'model, or use mode="quant".'
            )
        facts = pruning.method.finish_(pruning.owner)
    tensors = _gather(model)
    if mode == "quant":
        names = _quantised(model)
        if not names:
            raise ConfigError(
                'mode="quant" needs a quantized model, but no layer of this model was '
                "quantized. Set quantization.is_quant to true in the config."
            )
        for name in names:
            rows, scale = quantize_rows(tensors.pop(f"{name}.weight").float())
            tensors[f"{name}.weight_quant"] = rows
            tensors[f"{name}.weight_scale"] = scale.flatten().half()

    def write() -> None:
        _write(Path(file_name), tensors)
        if facts is not None:
            replace_file(f"{file_name}.config.json", json.dumps(facts, indent=2) + "\n")

    run_on_first(write)


def _gather(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_tensor(t).cpu() for name, t in model.state_dict(keep_vars=True).items()}


def _quantised(model: nn.Module) -> list[str]:
    """Return the names of the int8 layers of a model."""
    return [
        name
        for name, module in model.named_modules()
        if linear_sizes(module) is not None and is_rounding(module)
    ]


def _write(path: Path, value: Any) -> None:
    with replace_atomically(path) as file:
        torch.save(value, file)


def save_masks(file_name: str, model: nn.Module | None = None) -> None:
    """Write a pruned model's masks: a bool tensor for each parameter, True for nonzero weights.

    Args:
        file_name: path of the file to write.
        model: pruned model (required).
    """
    pruned = _pruned(model)
    masks = {
        name: whole_tensor(parameter.detach()).cpu() != 0
        for name, parameter in pruned.named_parameters()
        if parameter.dim() == 2
    }
    masks = {name: mask for name, mask in masks.items() if not mask.all()}
    run_on_first(lambda: _write(Path(file_name), masks))


@torch.no_grad()
def load_masks(file_name: str, model: nn.Module | None = None) -> None:
    """Zero the weights that saved masks exclude.

    Args:
        file_name: file that `save_masks` wrote.
        model: model that `CookTrainer.set_compression` has pruned.

    Raises:
        CheckpointError: the file belongs to another model.
    """
    pruned = _pruned(model)
    masks: dict[str, Tensor] = torch.load(file_name, map_location="cpu", weights_only=True)
    parameters = dict(pruned.named_parameters())
    wrong = [
        name
        for name, mask in masks.items()
        if name not in parameters or tuple(parameters[name].shape) != tuple(mask.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{file_name!r} contains the masks of another model: {', '.join(wrong[:5])} do not "
            f"exist in this {type(pruned).__name__}, or have another shape. Load the masks into "
            "the model for which they were saved."
        )
    for name, mask in masks.items():
        parameter = parameters[name]
        if local_tensor(parameter).shape != mask.shape:
            raise ConfigError(
                "load_masks does not support sharded models. Load the masks on one process."
            )
        local_tensor(parameter).mul_(mask.to(parameter.device))


def _pruned(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise ConfigError(
            "several models are pruned. Pass the model: save_masks(file, model) and "
            "load_masks(file, model)."
        )
    if pruning_of(model) is None:
        raise ConfigError(
            f"this {type(model).__name__} was not pruned. Call CookTrainer.set_compression first."
        )
    return model
