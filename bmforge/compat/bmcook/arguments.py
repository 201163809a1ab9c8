"""BMCook's command line, which its examples for GPT-2 and T5 parse."""

from __future__ import annotations

import argparse

__all__ = ["parse_args"]


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
