"""Converts CPM-Pretrain's ``ds_config_*.json`` to fields of a `bmforge train` config.

CPM-Pretrain read the file for pipelines only, and otherwise used only the command line. If
``train_batch_size`` differs from the product of the other batch sizes in the file, the product is
used, with a warning.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError, suggest
from bmforge.logging import get_logger
from bmforge.recipes.micro_batches import resolve_batch
from bmforge.train.loss_scale import LossScaleConfig

__all__ = ["apply_ds_config", "read_ds_config"]

# Setting without effect -> reason; each is logged and ignored.
_WITHOUT_EFFECT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_COUNT = (int, lambda n: n >= 1, "an integer of at least 1")
_NUMBER = (int | float, lambda n: n >= 0, "at least 0")
_OBJECT = (dict, lambda _: True, "an object")
# Setting -> type, condition, and their text for the error message.
_CHECKS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "steps_per_print": _COUNT,
    "gradient_clipping": _NUMBER,
    "fp16": _OBJECT,
    "fp16.enabled": (bool, lambda _: True, "true or false"),
    "fp16.loss_scale": _NUMBER,
    "fp16.initial_scale_power": (int, lambda n: 0 <= n <= 127, "0 to 127"),
    "fp16.loss_scale_window": _COUNT,
    "fp16.hysteresis": _COUNT,
    "fp16.min_loss_scale": (int | float, lambda n: n > 0, "above 0"),
    "zero_optimization": _OBJECT,
    "zero_optimization.stage": (int, lambda n: 0 <= n <= 3, "0, 1, 2 or 3"),
}


def read_ds_config(path: str | Path) -> dict[str, Any]:
    """Read and check the settings in a file.

    Raises:
        ConfigError: the file is missing or not a JSON object, a name is unknown, or a value is
            out of range.
    """
    file = Path(path)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read --ds-config {str(file)!r} ({error.strerror}). Check its path."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"--ds-config {str(file)!r} is not JSON ({error}). Correct the file."
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--ds-config {str(file)!r} must contain a JSON object of settings.")
    _check(settings, str(file))
    _check(settings.get("fp16") or {}, str(file), "fp16.")
    zero = settings.get("zero_optimization") or {}
    _check({name: zero[name] for name in zero if name == "stage"}, str(file), "zero_optimization.")
    return settings


def _check(values: Mapping[str, Any], file: str, prefix: str = "") -> None:
    """Check the names and values of a JSON object; `prefix` is its name with a dot."""
    names = [name.removeprefix(prefix) for name in _CHECKS if name.startswith(prefix)]
    names = [name for name in names + [*_WITHOUT_EFFECT] * (not prefix) if "." not in name]
    for name, value in values.items():
        if name not in names:
            raise ConfigError(
                f"--ds-config {file!r}: unknown setting {prefix}{name} (supported: "
                f"{', '.join(names)}).{suggest(name, names)}"
            )
        if value is None or name in _WITHOUT_EFFECT:
            continue
        kind, fits, needed = _CHECKS[prefix + name]
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_kind or not fits(value):
            raise ConfigError(f"--ds-config {file!r}: {prefix}{name}={value!r} must be {needed}.")


def apply_ds_config(config: Any, path: str | Path, world_size: int) -> Any:
    """Update a config with the settings of a CPM-Pretrain file, which have precedence.

    Args:
        config: recipe config with `train` and `data`.
        path: path of the JSON file.
        world_size: number of processes, from which the total batch size is computed: micro batch
            size x accumulation steps x processes / (pp x tp).

    Raises:
        ConfigError: the file is invalid or does not fit the run.
    """
    settings, log = read_ds_config(path), get_logger()
    if config.layout.pp == 1:
        why = "as in CPM-Pretrain, because there is no pipeline (layout.pp=1)"
        log.warning("--ds-config %s is ignored, %s", path, why)
        return config
    for name in _WITHOUT_EFFECT:
        if name in settings:
            log.info("--ds-config: %s has no effect (%s)", name, _WITHOUT_EFFECT[name])
    fp16 = settings.get("fp16") or {}
    train: dict[str, Any] = {"precision": "fp16" if fp16.get("enabled", False) else "fp32"}
    if "gradient_clipping" in settings:
        train["grad_clip"] = float(settings["gradient_clipping"]) or None
    if "steps_per_print" in settings:
        train["log_every_steps"] = settings["steps_per_print"]
    changes = {
        "train": dataclasses.replace(config.train, **train),
        "loss_scale": _loss_scale(fp16) if fp16.get("enabled", False) else LossScaleConfig(),
        "data": _batch(config, settings, world_size),
    }
    stage = (settings.get("zero_optimization") or {}).get("stage")
    if stage is not None:
        # Stage 1 shards only the optimizer state; stage 2 is the nearest one supported.
        zero = 2 if stage == 1 else stage
        changes["layout"] = dataclasses.replace(config.layout, zero=zero)
    return dataclasses.replace(config, **changes)


def _loss_scale(fp16: Mapping[str, Any]) -> LossScaleConfig:
    if fp16.get("loss_scale"):
        return LossScaleConfig(fixed=float(fp16["loss_scale"]))
    # Missing settings have DeepSpeed's defaults.
    return LossScaleConfig(
        init_scale=2.0 ** fp16.get("initial_scale_power", 32),
        growth_interval_steps=fp16.get("loss_scale_window", 1000),
        min_scale=float(fp16.get("min_loss_scale", 1)),
        hysteresis=fp16.get("hysteresis", 2),
    )


def _batch(config: Any, settings: Mapping[str, Any], world_size: int) -> Any:
    """Return the data config with the file's batch sizes; the total batch is their product."""
    data, layout = config.data, config.layout
    micro = settings.get("train_micro_batch_size_per_gpu", data.micro_batch_size)
    steps = settings.get("gradient_accumulation_steps", data.grad_accum_steps)
    data = dataclasses.replace(data, micro_batch_size=micro)
    if steps is not None:
        usual = type(config)().data.global_batch_size
        data = dataclasses.replace(data, grad_accum_steps=steps, global_batch_size=usual)
        layout.check(world_size)
        data = resolve_batch(dataclasses.replace(config, data=data), world_size)
    stated, used = settings.get("train_batch_size"), data.global_batch_size
    if stated is not None and stated != used:
        rule = "data.global_batch_size"
        if steps is not None:
            rule = (
                f"{micro} sequences x {steps} accumulation steps x {world_size} processes / "
                f"pp={layout.pp} / tp={layout.tp}"
            )
        fact = f"{rule} is {used}: {used} is used"
        get_logger().warning(
            "train_batch_size=%d of --ds-config is ignored, because %s", stated, fact
        )
    return data
