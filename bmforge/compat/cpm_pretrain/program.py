"""Megatron's global objects (arguments, timers, tokenizer), and its helpers for masks and losses.

`program` is the only state; `initialize_megatron` fills it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.cpm_pretrain.arguments import ARGUMENTS, PARSER_DEFAULTS, SWITCHES, Migrated
from bmforge.compat.cpm_pretrain.migrate import place_arguments
from bmforge.compat.cpm_pretrain.mpu.initialize import groups, join_layout
from bmforge.compat.cpm_pretrain.mpu.random import model_parallel_cuda_manual_seed
from bmforge.compat.cpm_pretrain.pipe import PipeModelDataParallelTopology
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.parallel import Layout, init_distributed
from bmforge.train.checkpoint.rng import seed_all

__all__ = [
    "Timers", "get_args", "get_timers", "get_tokenizer", "initialize_megatron", "print_rank_0",
    "program", "get_ltor_masks_and_position_ids", "reduce_losses",
]  # fmt: skip

# Argument groups that configure training; the others are read by the program's own functions.
_TRAINS = ("Parallelism", "Training", "Precision", "Memory", "Saving and evaluating")
# Ignored here, as these arguments only apply to layers that the engine shards itself.
_NOT_BY_HAND = ("--partition-activations", "--distribute-checkpointed-activations")


class Program:
    """State of the program that runs in this process.

    Attributes:
        args: parsed arguments; None before parsing.
        placed: the arguments, converted to fields of a `bmforge train` config.
        timers: the program's timers.
        tokenizer: tokenizer of --vocab-file, once it was requested.
    """

    def __init__(self) -> None:
        self.args: argparse.Namespace | None = None
        self.placed: Migrated | None = None
        self.timers = Timers()
        self.tokenizer: Any = None


class _Timer:
    """Timer that accumulates the time between `start` and `stop`."""

    def __init__(self) -> None:
        self._total_s: float = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start the timer after the device has finished its work."""
        self._since = _now()

    def stop(self) -> None:
        """Stop the timer, and add the elapsed time to the total."""
        if self._since is None:
            raise ConfigError("the timer was not started. Call start() first.")
        self._total_s += _now() - self._since
        self._since = None

    def reset(self) -> None:
        """Set the accumulated time to 0."""
        self._total_s, self._since = 0.0, None

    def elapsed(self, reset: bool = True) -> float:
        """Return the accumulated seconds, and reset them by default."""
        seconds = self._total_s + (0.0 if self._since is None else _now() - self._since)
        if reset:
            self._total_s, self._since = 0.0, None if self._since is None else _now()
        return seconds


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class Timers:
    """Collection of named timers; a timer is created when its name is first used."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        """Return the timer with a name."""
        return self.timers.setdefault(name, _Timer())

    def write(
        self, names: Iterable[str], writer: Any, iteration: int, normalizer: float = 1.0
    ) -> None:
        """Write the accumulated seconds, divided by `normalizer`, to a TensorBoard writer."""
        for name in names:
            value = self(name).elapsed(reset=False) / normalizer
            writer.add_scalar(f"{name}_time", value, iteration)

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print the accumulated milliseconds, divided by `normalizer`, on rank 0."""
        entries = [f"{n}: {self(n).elapsed(reset) * 1e3 / normalizer:.2f}" for n in names]
        print_rank_0(f"time (ms) | {' | '.join(entries)}")


program = Program()


def get_args() -> argparse.Namespace:
    """Return the parsed arguments.

    Raises:
        ConfigError: `initialize_megatron` was not called.
    """
    if program.args is None:
        raise ConfigError(
            "the arguments are not parsed yet. Call initialize_megatron() or pretrain()."
        )
    return program.args


def get_timers() -> Timers:
    """Return the timers."""
    return program.timers


def get_tokenizer() -> Any:
    """Return the tokenizer in the directory given by --vocab-file.

    Raises:
        ConfigError: --vocab-file is not given.
    """
    if program.tokenizer is None:
        from bmforge.tokenizers import AutoTokenizer

        path = get_args().vocab_file
        if path is None:
            raise ConfigError("get_tokenizer() needs --vocab-file, the directory of a tokenizer.")
        vocab_path = Path(path)
        program.tokenizer = AutoTokenizer.from_pretrained(
            str(vocab_path.parent if vocab_path.suffix else vocab_path)
        )
    return program.tokenizer


def print_rank_0(message: object) -> None:
    """Log a message on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        get_logger().info("%s", message)


def initialize_megatron(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = True,
) -> None:
    """Parse the command line, initialize the process groups, and seed the random generators.

    Args:
        extra_args_provider: function that adds a program's own arguments to the parser.
        args_defaults: dict from the name of an argument in the namespace to its default.
        ignore_unknown_args: True to ignore arguments that the parser does not know.
        allow_no_cuda: accepted and ignored; a CPU is always allowed.

    Raises:
        ConfigError: the parallel sizes do not fit the processes, or an argument is unsupported.
    """
    program.__init__()  # type: ignore[misc]
    program.args = args = _parse(extra_args_provider, args_defaults or {}, ignore_unknown_args)
    world = init_distributed()
    args.rank, args.world_size = world.rank, world.size
    args.model_parallel_size = min(args.model_parallel_size, world.size)
    program.placed = _place(args)
    layout = config_from_dict(Layout, program.placed.values.get("layout", {}))
    topology = None
    if layout.pp > 1:
        layout.check(world.size)
        shared = (layout.pp, layout.tp, world.size // layout.pp // layout.tp)
        topology = PipeModelDataParallelTopology(*shared)
    groups.forget()
    join_layout(layout, topology)
    seed_all(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def _parse(
    extra: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None,
    defaults: Mapping[str, Any],
    ignore_unknown: bool,
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    kinds = {"int": int, "float": float, "str": str}
    for name, entry in (entry for group in ARGUMENTS.values() for entry in group.items()):
        if name in SWITCHES:
            parser.add_argument(name, action="store_true")
        elif name.startswith("--"):
            default = PARSER_DEFAULTS.get(name)
            parser.add_argument(name, type=kinds[entry.type], default=default)
    if extra is not None:
        parser = extra(parser) or parser
    args = parser.parse_known_args()[0] if ignore_unknown else parser.parse_args()
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.pipe_parallel_size == 1:
        args.pipe_parallel_size = 0
    heads, hidden = args.num_attention_heads, args.hidden_size
    if args.kv_hidden_size is None and hidden and heads:
        args.kv_hidden_size = hidden // heads
    if args.ff_hidden_size is None and hidden:
        args.ff_hidden_size = 4 * hidden
    args.enc_seq_length = args.enc_seq_length or args.seq_length
    args.dec_seq_length = args.dec_seq_length or args.seq_length
    # Parameters are stored in fp32; --fp16 sets the dtype in which blocks compute.
    args.params_dtype, args.dynamic_loss_scale = torch.float32, args.loss_scale is None
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return args


def _place(args: argparse.Namespace) -> Migrated:
    """Convert the arguments to fields of a `bmforge train` config."""
    arguments = {}
    for name in (name for group in _TRAINS for name in ARGUMENTS[group]):
        value = getattr(args, name.removeprefix("--").replace("-", "_"), None)
        if value not in (None, False) and name not in _NOT_BY_HAND:
            arguments[name] = value
    off = arguments.pop("--clip-grad", 0.0) if args.clip_grad == 0 else None
    placed = place_arguments("gpt2-pretrain", arguments)
    if off is not None:
        placed.values["train"]["grad_clip"] = None
    lost = [f"{name}: {why}" for name, why in placed.unplaced if name.split()[0] in arguments]
    if lost:
        raise ConfigError(f"unsupported arguments: {'; '.join(lost)}. Leave them out.")
    return placed


def reduce_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of each loss over all processes."""
    total = torch.stack([loss.detach().float().reshape(()) for loss in losses])
    dist.all_reduce(total)
    return total / dist.get_world_size()


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention mask, the loss mask and the position ids of a batch.

    Args:
        data: token ids.
        eod_token: id of the end-of-document token.
        reset_position_ids: True to restart positions after this token.
        reset_attention_mask: True to prevent attention across this token.
        eod_mask_loss: True to exclude this token from the loss.

    Shape:
        data: (B, T) -> (B or 1, 1, T, T) booleans (True is masked), (B, T), (B, T)
    """
    rows, length = data.shape
    places = torch.arange(length, device=data.device)
    hidden = (places[None, :] > places[:, None])[None]
    ends = data == eod_token
    # Document index of each token; an end token belongs to the document that it ends.
    document = ends.cumsum(1) - ends.long()
    if reset_attention_mask:
        hidden = hidden | (document[:, :, None] != document[:, None, :])
    counts = (~ends if eod_mask_loss else torch.ones_like(ends)).float()
    position_ids = places.expand(rows, length)
    if reset_position_ids:
        begins = torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), 1)
        position_ids = position_ids - (places * begins).cummax(1).values
    return hidden[:, None], counts, position_ids
