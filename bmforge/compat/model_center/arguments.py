"""ModelCenter's command-line arguments for training programs."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_model_config_args", "add_training_args", "get_args"]

_TRAINING = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_TYPES = {"int": int, "float": float, "str": str}
_STYLES = ("constant", "linear", "cosine", "exponential", "noam")


def add_model_config_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument --model-config to a parser."""
    group = parser.add_argument_group("model", "model configuration")
    group.add_argument("--model-config", type=str, help="directory or name of the model")
    return parser


def add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all training arguments to a parser."""
    group = parser.add_argument_group("train", "training configurations")
    for name, settings in _TRAINING.items():
        group.add_argument(name, **{**settings, "type": _TYPES[settings["type"]]})
    group.add_argument(
        "--lr-decay-style", default="noam", choices=_STYLES, help="shape of the learning-rate decay"
    )
    return parser


def get_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; convert `warmup_iters` to iterations if it is a fraction.

    Args:
        arguments: command line (default: that of the process).
    """
    parser = add_training_args(add_model_config_args(argparse.ArgumentParser()))
    args = parser.parse_args(arguments)
    if 0 < args.warmup_iters < 1:
        args.warmup_iters *= args.lr_decay_iters or args.train_iters * args.epochs
    return args
