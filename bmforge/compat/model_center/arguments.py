"""ModelCenter's command-line arguments for training programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["add_model_config_args", "add_training_args", "get_args"]

# option -> type, default, help
_TRAINING: dict[str, tuple[type, Any, str]] = {
    "--base-path": (str, None, "directory of the data"),
    "--dataset_name": (str, None, "name of the dataset"),
    "--load": (str, None, "directory of the checkpoint to load"),
    "--save": (str, None, "directory for checkpoints"),
    "--save-name": (str, None, "file name of the checkpoints"),
    "--save-iters": (int, 1000, "iterations between saves"),
    "--inspect-iters": (int, 1000, "iterations between inspections"),
    "--batch-size": (int, 32, "batch size per process"),
    "--clip-grad": (float, 1.0, "maximum gradient norm"),
    "--train-iters": (int, 1000000, "number of iterations of a run, or of an epoch"),
    "--max-length": (int, 512, "maximum input length in tokens"),
    "--max-encoder-length": (int, 512, "maximum encoder input length in tokens"),
    "--max-decoder-length": (int, 256, "maximum decoder input length in tokens"),
    "--start-step": (int, 0, "number of the first step"),
    "--seed": (int, 1234, "random seed"),
    "--epochs": (int, 1, "number of epochs"),
    "--lr": (float, 1.0e-4, "peak learning rate"),
    "--weight-decay": (float, 1.0e-2, "weight decay"),
    "--loss-scale": (float, 65536, "initial loss scale"),
    "--warmup-iters": (float, 0.01, "warm-up iterations; below 1, a fraction of all iterations"),
    "--lr-decay-iters": (int, None, "decay iterations (default: train-iters x epochs)"),
    "--local_rank": (int, None, "passed by older launchers"),
}
_STYLES = ("constant", "linear", "cosine", "exponential", "noam")


def add_model_config_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument --model-config to a parser."""
    group = parser.add_argument_group("model", "model configuration")
    group.add_argument("--model-config", type=str, help="directory or name of the model")
    return parser


def add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all training arguments to a parser."""
    group = parser.add_argument_group("train", "training configurations")
    for name, (kind, default, help_text) in _TRAINING.items():
        group.add_argument(name, type=kind, default=default, help=help_text)
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
