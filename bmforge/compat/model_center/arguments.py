"""ModelCenter's command-line arguments for training programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["add_model_config_args", "add_training_args", "get_args"]

# option -> type, default, help
_TRAINING: dict[str, tuple[type, Any, str]] = {
    "--base-path": (str, None, "folder of the project's data"),
    "--dataset_name": (str, None, "name of the data set"),
    "--load": (str, None, "folder of a checkpoint to load"),
    "--save": (str, None, "folder to save checkpoints in"),
    "--save-name": (str, None, "name of the saved files"),
    "--save-iters": (int, 1000, "iterations between saves"),
    "--inspect-iters": (int, 1000, "iterations between inspections"),
    "--batch-size": (int, 32, "examples of a batch of one process"),
    "--clip-grad": (float, 1.0, "longest gradient"),
    "--train-iters": (int, 1000000, "iterations of a run, or of an epoch"),
    "--max-length": (int, 512, "longest input in tokens"),
    "--max-encoder-length": (int, 512, "longest input of an encoder in tokens"),
    "--max-decoder-length": (int, 256, "longest input of a decoder in tokens"),
    "--start-step": (int, 0, "step to begin with"),
    "--seed": (int, 1234, "of all random numbers"),
    "--epochs": (int, 1, "how often to go through the data"),
    "--lr": (float, 1.0e-4, "peak learning rate"),
    "--weight-decay": (float, 1.0e-2, "weight decay"),
    "--loss-scale": (float, 65536, "factor on the loss"),
    "--warmup-iters": (float, 0.01, "iterations of warm-up; below 1, a fraction of all of them"),
    "--lr-decay-iters": (int, None, "iterations of decay; by default train-iters x epochs"),
    "--local_rank": (int, None, "given by older launchers"),
}
_STYLES = ("constant", "linear", "cosine", "exponential", "noam")


def add_model_config_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument --model-config to a parser."""
    group = parser.add_argument_group("model", "model configuration")
    group.add_argument("--model-config", type=str, help="folder or name of the model")
    return parser


def add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all training arguments to a parser."""
    group = parser.add_argument_group("train", "training configurations")
    for name, (kind, default, help_text) in _TRAINING.items():
        group.add_argument(name, type=kind, default=default, help=help_text)
    group.add_argument(
        "--lr-decay-style", default="noam", choices=_STYLES, help="how the rate decays"
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
