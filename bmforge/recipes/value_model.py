"""PPO's value model: checks its options, builds it in the policy's layout, and describes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from bmforge.align.policy import Policy
from bmforge.align.value_training import ValueTrainer
from bmforge.device import device_name
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models.hub import find_model
from bmforge.models.tensor_matching import find_missing_head
from bmforge.parallel import World, joined_world, mesh_of
from bmforge.recipes.build import build_model, describe_model
from bmforge.recipes.start import family_of, find_start, traits_of

__all__ = ["check_value", "describe_value_model", "open_value"]

_HEAD = "sequence_classification"


def check_value(config: Any, policy: Policy) -> None:
    """Raise `ConfigError` for options that have no effect or that conflict with a value model.

    Args:
        config: config of a reinforcement-learning run.
        policy: settings of the policy loss.
    """
    config.value.check(policy.advantage == "gae")
    if policy.advantage != "gae":
        return
    split = config.layout.splits_stages_or_tokens
    refused = {
        split: bool(split),
        "train.precision=fp16": config.train.precision == "fp16",
        "offload": config.offload.is_on or config.offload.weights,
    }
    for option, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{option} does not work with a value model (rl.advantage=gae). Leave it out, or "
                "choose a method without a value model, such as --method grpo."
            )
    _value_config(config)


def open_value(config: Any, policy: Any) -> ValueTrainer:
    """Build the value model of a run, in the layout of the policy, and its trainer.

    Args:
        config: config of the run, with all defaults resolved.
        policy: parallelized policy.

    Comm: collectives of loading and sharding the model.
    """
    own = _value_config(config)
    device = next(policy.parameters()).device
    mesh: Any = mesh_of(policy)
    model, _, _ = build_model(own, joined_world(World(0, 1, device)), mesh)
    get_logger().info(
        "value model: %s from %s, %d parameters, on %s; learning rate %g",
        type(model).__name__,
        own.init_from or "a random initialization",
        sum(p.numel() for p in model.whole().parameters()),
        device_name(device),
        config.value.lr,
    )
    return ValueTrainer(model, own.train, config.value)


def describe_value_model(config: Any) -> nn.Module:
    """Build a run's value model, with its adapter, on the meta device, to estimate its memory."""
    return describe_model(_value_config(config))


def _value_config(config: Any) -> Any:
    """Return the value model's run config: a one-output classifier with its own learning rate."""
    start, model = config.value.init_from, config.model
    if start is not None:
        model = _read_start(start, model)
    model = model.replace(head=_HEAD, num_labels=1)
    start = config.init_from if start is None else start
    train = dataclasses.replace(
        config.train, optim=dataclasses.replace(config.train.optim, lr=config.value.lr)
    )
    new_head = start is not None and bool(
        find_missing_head(family_of(model).from_config(model, device="meta"), find_model(start))
    )
    return dataclasses.replace(config, init_from=start, model=model, new_head=new_head, train=train)


def _read_start(start: str, policy: Any) -> Any:
    """Return the config of `value.init_from`; its vocabulary must be the policy's."""
    initial = find_start(start)
    config: Any = initial.config
    if initial.init_from is None:
        raise ConfigError(
            f"value.init_from={start!r} has no weights. Pass the directory or hub id of a reward "
            "model or language model, or leave it out to start from the policy."
        )
    if traits_of(config).is_encoder_decoder:
        raise ConfigError(
            f"value.init_from={start!r} is a {initial.family.__name__}, an encoder-decoder, "
            "which cannot predict a value at each token. Use a reward model or language model "
            "that is a decoder."
        )
    if config.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"value.init_from={start!r} has vocab_size={config.vocab_size}, but the policy "
            f"has {policy.vocab_size}. Use a model with the policy's tokenizer."
        )
    return config
