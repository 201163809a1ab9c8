"""Reads BMCook's command line and JSON configs, and converts the configs to compression recipes."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmforge.compat.bmcook.addresses import modules_with, read_pair
from bmforge.errors import ConfigError, suggest
from bmforge.files import replace_file
from bmforge.logging import get_logger
from bmforge.models import AutoModel, Model
from bmforge.recipes.adapter_dirs import find_source

__all__ = ["ConfigParser", "pattern_of", "recipe_from_bmcook", "structure_table", "parse_args"]

# Default values by section and key; those of pruning.sprune are separate.
_KEYS = json.loads(Path(__file__).with_name("config_keys.json").read_text("utf-8"))
_DEFAULTS: Mapping[str, Mapping[str, Any]] = _KEYS["sections"]
_SPRUNE: Mapping[str, Any] = _KEYS["sprune"]
# Maps older keys to (current key, function that converts the value).
_OLDER = {
    "fixed_mask_path": ("mask_path", lambda value: value),
    "mask_mode": ("is_training", lambda value: value == "train_mask"),
}
_PATTERNS = {"m4n2_1d": "2:4", "m4n2_2d": "2:4-both-greedy"}
_METHODS = (*_PATTERNS, "sprune")
_GATES = {
    "transformer": "block", "att": "attn", "ffn": "mlp", "num_heads": "heads", "dim_ff": "features",
}  # fmt: skip
_PLACEHOLDER = "[placehold]"
# JSON key of additional recipe settings.
_OWN = "bmforge"


class ConfigParser:
    """BMCook's JSON config, with defaults filled in.

    Args:
        config_file: path of the file.

    Raises:
        ConfigError: the file is missing or not JSON, or has unknown or conflicting keys.
    """

    def __init__(self, config_file: str) -> None:
        self.config_file = config_file
        self.load()

    def load(self) -> None:
        """Read the config file."""
        try:
            raw = json.loads(Path(self.config_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.config_file!r} cannot be read as a BMCook config ({error}). Pass a JSON "
                "file with BMCook's sections."
            ) from error
        self.config: dict[str, Any] = check_cook_config(raw)

    def get(self, key: str) -> Any:
        """Return one section: distillation, pruning, quantization or MoEfication."""
        if key not in self.config:
            raise ConfigError(
                f"the configuration has no section {key!r}.{suggest(key, self.config)}"
            )
        return self.config[key]

    def save(self) -> None:
        """Write the config file, including all defaults."""
        replace_file(self.config_file, json.dumps(self.config, indent=4) + "\n")


def check_cook_config(raw: Any) -> dict[str, Any]:
    """Check a config; return it with default values, and old key names replaced by current ones.

    Raises:
        ConfigError: the config has unknown or conflicting keys.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"a BMCook config must be a JSON object with sections, not {raw!r}.")
    sections = [*_DEFAULTS, _OWN]
    checked: dict[str, Any] = {_OWN: raw.get(_OWN, {})} if _OWN in raw else {}
    for section, section_values in raw.items():
        if section not in sections:
            raise ConfigError(
                f"unknown section {section!r} (supported: {', '.join(sections)})."
                f"{suggest(section, sections)}"
            )
        for key in section_values if section != _OWN else ():
            if key not in _DEFAULTS[section]:
                hint = suggest(key, _DEFAULTS[section])
                raise ConfigError(f"unknown key {section}.{key}.{hint}")
    for section, usual in _DEFAULTS.items():
        checked[section] = {**copy.deepcopy(dict(usual)), **raw.get(section, {})}
        for key, value in checked[section].items():
            if isinstance(value, list):
                checked[section][key] = [entry for entry in value if entry != _PLACEHOLDER]
    pruning = checked["pruning"]
    pruning["sprune"] = _check_sprune(pruning["sprune"])
    if pruning["is_pruning"] and pruning["mask_method"] not in _METHODS:
        raise ConfigError(
            f"pruning.mask_method={pruning['mask_method']!r} must be one of {', '.join(_METHODS)}."
        )
    hidden = checked["distillation"]
    if hidden["mse_hidn_scale"] and not hidden["mse_hidn_module"]:
        raise ConfigError(
            f"distillation.mse_hidn_scale={hidden['mse_hidn_scale']} needs the pairs of modules to "
            "compare. Set distillation.mse_hidn_module."
        )
    return checked


def _check_sprune(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the ``sprune`` settings; add defaults, and replace old key names by current ones."""
    out = copy.deepcopy(dict(_SPRUNE))
    for key, value in values.items():
        name, turn = _OLDER.get(key, (key, lambda same: same))
        if name not in _SPRUNE:
            raise ConfigError(f"unknown key pruning.sprune.{key}.{suggest(key, _SPRUNE)}")
        new = turn(value)
        if key != name and name in values and values[name] != new:
            raise ConfigError(
                f"pruning.sprune.{key}={value!r} and {name}={values[name]!r} cannot be used "
                f"together. Leave out {key}, the older spelling."
            )
        out[name] = new
    return out


def recipe_from_bmcook(path: Path, model: str) -> dict[str, Any]:
    """Convert a BMCook JSON file to the tables of a compression recipe.

    Other recipe settings (steps, task, run, calibration, the teacher) can be set in the file under
    ``bmforge``.

    Args:
        path: path of the file.
        model: directory or hub id of the model whose module names are looked up.

    Raises:
        ConfigError: the file has unknown or conflicting keys, or options that are not supported.
    """
    config = ConfigParser(str(path)).config
    described = AutoModel.describe_pretrained(find_source(model).model)[0]
    own = dict(config.get(_OWN, {}))
    tables: dict[str, Any] = {}
    if distill := _distill_table(config["distillation"], described):
        tables["distill"] = {**distill, **own.pop("distill", {})}
    pruning = config["pruning"]
    if pruning["is_pruning"] and pruning["mask_method"] == "sprune":
        tables["structure"] = {**structure_table(pruning["sprune"]), **own.pop("structure", {})}
    elif pruning["is_pruning"]:
        where = modules_with(described, pruning["pruned_module"], "pruning.pruned_module")
        tables["prune"] = {"pattern": pattern_of(pruning["mask_method"]), "where": [*where]}
    if pruning["is_pruning"] and pruning["pruning_mask_path"]:
        why = "the pruned weights are zero and serve as the mask"
        get_logger().info(
            "pruning_mask_path=%r is not needed: %s", pruning["pruning_mask_path"], why
        )
    if config["quantization"]["is_quant"]:
        tables["quantize"] = quantize_table(described, config["quantization"])
    if config["MoEfication"]["is_moefy"]:
        tables["moefy"] = own.pop("moefy", {})
    clash = set(tables) & set(own)
    if clash:
        raise ConfigError(
            f"{min(clash)!r} is set both by one of BMCook's sections and in the section 'bmforge'. "
            "Keep one of them."
        )
    return {**tables, **own}


def quantize_table(model: Any, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the int8 settings (forward and backward) for the named linear layers."""
    table: dict[str, Any] = {"scheme": "int8-dynamic", "training": "int8-both"}
    if section["quantized_module"]:
        names = section["quantized_module"]
        table["where"] = [*modules_with(model, names, "quantization.quantized_module")]
    return table


def pattern_of(method: str) -> Any:
    """Convert BMCook's ``mask_method`` to the name of bmforge's sparsity pattern."""
    return _PATTERNS[method]


def structure_table(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of structured pruning."""
    unknown = [kind for kind in section["training_mask"] if kind not in _GATES]
    if unknown or not section["training_mask"]:
        raise ConfigError(
            f"pruning.sprune.training_mask={section['training_mask']} must contain one or more of "
            f"{', '.join(_GATES)}, and nothing else. Set other sizes in a bmforge recipe "
            "(docs/guides/compression.md)."
        )
    problems = []
    if not section["is_training"]:
        problems.append(
            "is_training=false is not supported (start from the model of an earlier run instead)"
        )
    if section["criterion"] != "l0" or section["target_mode"] != "sparsity":
        problems.append("criterion and target_mode can only be 'l0' and 'sparsity'")
    if problems:
        raise ConfigError(f"pruning.sprune: {'; '.join(problems)}.")
    for name in ("start_sparsity", "hard_binarize"):
        if section[name]:
            get_logger().info(
                "pruning.sprune.%s=%r: the gates start open and reach the target exactly",
                name,
                section[name],
            )
    for name in ("mask_path", "tuning"):
        if section[name]:  # BMCook ignores these two in training as well
            get_logger().info("pruning.sprune.%s is not used with is_training=true", name)
    return {
        "target": "parameters",
        "keep_ratio": 1 - section["target_sparsity"],
        "gates": [_GATES[kind] for kind in section["training_mask"]],
    }


def _distill_table(section: Mapping[str, Any], model: Any) -> dict[str, Any]:
    texts = {
        part: section[f"mse_{part}_module"] if section[f"mse_{part}_scale"] else ()
        for part in ("hidn", "att")
    }
    models = model, _deepen(model, " ".join(itertools.chain(*texts.values())))
    names = {part: [read_pair(pair, models) for pair in pairs] for part, pairs in texts.items()}
    losses: list[dict[str, Any]] = []
    if section["ce_scale"]:
        temperature = {"temperature": float(section["ce_temp"])}
        losses.append({"kind": "logits", "weight": float(section["ce_scale"]), **temperature})
    if section["mse_hidn_scale"]:
        form = {"form": "mean_norm", "pairs": names["hidn"]}
        losses.append({"kind": "hidden", "weight": float(section["mse_hidn_scale"]), **form})
    if section["mse_att_scale"]:
        loss: dict[str, Any] = {"kind": "attention", "weight": float(section["mse_att_scale"])}
        losses.append(loss | ({"pairs": names["att"]} if names["att"] else {}))
    return {"losses": losses} if losses else {}


def _deepen(model: Any, text: str) -> Any:
    """Return a model that has all layers named in `text`, to look up names of a deeper teacher.

    Args:
        model: returned unchanged if it has enough layers; otherwise a deeper model of its family
            is built on the meta device.
        text: module names, of which those of layers contain ``layers.INDEX``.
    """
    depth = 1 + max(map(int, re.findall(r"layers\.(\d+)", text)), default=0)
    if not isinstance(model, Model) or depth <= model.config.num_layers:
        return model
    counts = ("num_layers", "num_decoder_layers")
    changes = {name: depth for name in counts if hasattr(model.config, name)}
    return type(model).from_config(model.config.replace(**changes), device="meta")


def parse_args() -> argparse.Namespace:
    """Parse the program's command line; return the arguments as a namespace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="name or directory of the model")
    parser.add_argument("--save-dir", required=True, help="directory for the results")
    parser.add_argument("--log-interval", type=int, default=1, help="steps between log lines")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--start-lr", type=float, default=1e-4, help="initial learning rate")
    parser.add_argument("--data-path", default="openwebtext_document", help="path of the data")
    parser.add_argument("--cook-config", help="path of BMCook's config file")
    return parser.parse_args()
