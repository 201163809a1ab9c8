"""Converts start scripts of CPM-1-Finetune and CPM-2-Pretrain to `bmforge train` configs.

The table is `finetune.toml`; arguments without an equivalent are listed, never dropped silently.
Source: ``arguments.py`` of TsinghuaAI/CPM-1-Finetune and CPM-2-Pretrain for defaults.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmforge.compat.cpm_pretrain.arguments import Argument, Migrated, split_words
from bmforge.compat.cpm_pretrain.ds_config import read_ds_config
from bmforge.errors import ConfigError

__all__ = ["PROGRAMS", "UNSUPPORTED", "place_finetune"]

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PROGRAMS: dict[str, str] = _FILE["programs"]
UNSUPPORTED: dict[str, str] = _FILE["unsupported"]
# Default values of the programs that differ from those of the recipes.
_DEFAULTS = {"--weight-decay": "0.01", "--clip-grad": "1.0", "--warmup": "0.01", "--seed": "1234"}
_NAMES = {name for part in ("fields", "switches", "dropped", "unplaced") for name in _FILE[part]}
_NAMES |= {"--model-config", "--data_dir", "--lr-decay-style", "--deepspeed_config", "--split"}
_NAMES |= {*_DEFAULTS}
_SWITCHES = {*_FILE["switches"], "--do_train", "--do_eval", "--deepspeed", "--no-load-optim"}
_SWITCHES |= {"--no-load-rng", "--finetune"}


def place_finetune(program: str, words: Sequence[str]) -> Migrated:
    """Convert the arguments of a program to a config of `bmforge train`.

    Args:
        program: name of the program's file, a key of `PROGRAMS`.
        words: words of the command line after the program.

    Raises:
        ConfigError: a value has the wrong type.
    """
    out = Migrated(PROGRAMS[program])
    arguments = {**_DEFAULTS, **split_words(words, _NAMES, _SWITCHES, out)}
    if config := arguments.get("--model-config"):
        _place_model(out, Path(config))
    for name, value in arguments.items():
        _place(out, name, value)
    _place_sizes(out)
    _place_schedule(out, arguments)
    if out.values.get("train", {}).get("precision") != "fp16":
        out.values.setdefault("train", {})["precision"] = "fp32"
    if "--split" in arguments:
        out.put("data.split", [float(part) for part in arguments["--split"].split(",")])
    if file := arguments.get("--deepspeed_config"):
        _place_ds_config(out, file)
    if folder := arguments.get("--data_dir"):
        _place_folder(out, program, Path(folder))
    return out


def _place(out: Migrated, name: str, value: str) -> None:
    """Convert one argument as `finetune.toml` says; a switch sets the field to a fixed value."""
    if name in _FILE["fields"]:
        path, kind = _FILE["fields"][name]
        out.put(path, [value] if kind == "list" else Argument(type=kind).read(name, value))
    elif name in _FILE["switches"]:
        out.put(*_FILE["switches"][name])
    elif name in _FILE["dropped"]:
        out.dropped.append((name, _FILE["dropped"][name]))
    elif name in _FILE["unplaced"]:
        out.unplaced.append((f"{name} {value}", _FILE["unplaced"][name]))
    elif name == "--seed":
        for path in ("seed", "data.seed", "train.seed"):
            out.put(path, int(value))


def _place_sizes(out: Migrated) -> None:
    """Set the sizes that the programs derive from the hidden size."""
    model = out.values.get("model", {})
    if "hidden_size" in model and "intermediate_size" not in model:
        model["intermediate_size"] = 4 * model["hidden_size"]
    if "hidden_size" in model and "num_heads" in model and "head_dim" not in model:
        model["head_dim"] = model["hidden_size"] // model["num_heads"]


def _place_schedule(out: Migrated, arguments: dict[str, str]) -> None:
    """Set the learning rate schedule; `--warmup` is a fraction of the training steps."""
    style = arguments.get("--lr-decay-style", "linear")
    if style in ("linear", "cosine", "constant"):
        out.put("train.schedule.kind", style)
    else:
        out.unplaced.append((f"--lr-decay-style {style}", "set train.schedule.kind"))
    steps, share = out.values.get("train", {}).get("steps"), arguments["--warmup"]
    if steps is not None:
        out.put("train.schedule.warmup_steps", int(float(share) * steps))
        return
    why = "set train.schedule.warmup_steps to this fraction of train.steps"
    out.unplaced.append((f"--warmup {share}", why))


def _place_ds_config(out: Migrated, file: str) -> None:
    """Read accumulation steps and ZeRO stage from DeepSpeed's config, if it is available."""
    try:
        settings = read_ds_config(file)
    except ConfigError:
        why = "the file cannot be read: set data.grad_accum_steps and layout.zero"
        out.unplaced.append((f"--deepspeed_config {file}", why))
        return
    out.put("data.grad_accum_steps", int(settings.get("gradient_accumulation_steps", 1)))
    stage = (settings.get("zero_optimization") or {}).get("stage", 0)
    # Stage 1 is not supported; stage 2 is the nearest.
    out.put("layout.zero", 2 if stage == 1 else stage)


def _place_folder(out: Migrated, program: str, folder: Path) -> None:
    """Record that the data folder is not converted, and which files to use instead."""
    sources = {
        "finetune_lm.py": "the tab-separated posts and answers",
        "finetune_chid.py": "the original ChID files, from which preprocess_chid_finetune.py reads",
    }
    source = sources.get(program, "the text files")
    why = f"its preprocessed files are not read: set data.paths and data.validation to {source}"
    out.unplaced.append((f"--data_dir {folder}", why))


def _place_model(out: Migrated, path: Path) -> None:
    """Read the sizes from CPM-2's model config, if the file is available."""
    try:
        sizes: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        out.unplaced.append((f"--model-config {path}", "the file cannot be read: set model.*"))
        return
    for name, field in _FILE["model"].items():
        if name in sizes:
            out.put(field, sizes[name])
