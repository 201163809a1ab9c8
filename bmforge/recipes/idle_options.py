"""Refuses options of training runs that would have no effect."""

from __future__ import annotations

from typing import Any

from bmforge.errors import ConfigError
from bmforge.models.hub import find_model
from bmforge.models.tensor_matching import find_missing_head
from bmforge.parallel import is_half
from bmforge.recipes.compression_phases import has_phase
from bmforge.recipes.start import changed_fields, family_of

__all__ = ["refuse_idle_for", "refuse_idle_options", "refuse_idle_with"]


def refuse_idle_options(config: Any, **needs: Any) -> None:
    """Raise `ConfigError` for options of the model that have no effect in the run.

    Args:
        config: config of the run, before the task's head is set.
        needs: fields of `model` that the task sets, such as the head.
    """
    changed = changed_fields(config)
    for name, value in needs.items():
        chosen = getattr(config.model, name)
        if name in changed and chosen != value:
            raise ConfigError(
                f"model.{name}={chosen!r} has no effect, because this task trains a model with "
                f"{name}={value!r}. Leave it out."
            )
    if not str(needs.get("head")).endswith("classification"):
        for name in changed:
            if name == "num_labels" or name.startswith("classifier_"):
                raise ConfigError(
                    f"model.{name}={getattr(config.model, name)!r} has no effect, because the "
                    "model of this task has no classification head. Leave it out."
                )
    is_dropout = [name for name in changed if name == "layer_drop" or name.endswith("dropout")]
    for name in is_dropout:
        if config.train.disable_dropout and getattr(config.model, name):
            raise ConfigError(
                f"model.{name}={getattr(config.model, name)} has no effect, because this run "
                "disables dropout (train.disable_dropout=True). Leave it out."
            )
    if config.new_head and not type(config)().new_head and not _lacks_head(config, needs):
        raise ConfigError(
            "new_head=True has no effect, because the model has the head that this task trains. "
            "Leave it out."
        )


def _lacks_head(config: Any, needs: Any) -> bool:
    """Return True if the initial model lacks the head that the task trains."""
    if config.init_from is None:
        return False
    sizes = config.model.replace(**needs)
    described = family_of(sizes).from_config(sizes, device="meta")
    return bool(find_missing_head(described, find_model(config.init_from)))


def refuse_idle_for(model: Any, config: Any) -> None:
    """Raise `ConfigError` for training options that have no effect on the run's model."""
    if has_phase(config) and config.train.disable_dropout:
        raise ConfigError(
            "train.disable_dropout=True runs the model in evaluation mode, in which compression "
            "has no effect. Leave it out."
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not config.train.master_weights and not any(map(is_half, trained)):
        raise ConfigError(
            "train.master_weights=False has no effect, because all trained parameters of this run "
            "are in fp32. Leave it out."
        )


def refuse_idle_with(data: Any, config: Any) -> None:
    """Raise `ConfigError` for training options that have no effect on the run's `TrainingData`."""
    validation = getattr(config.data, "validation", None)
    if isinstance(validation, tuple) and validation and not data.held_out:
        raise ConfigError(
            f"data.validation={list(validation)} contains no example. Add examples, or leave it "
            "out."
        )
    if config.train.eval_every_steps is not None and not data.held_out:
        raise ConfigError(
            f"train.eval_every_steps={config.train.eval_every_steps} has no effect without "
            "held-out data. Pass --data.validation FILE, or remove eval_every_steps."
        )
    if config.train.num_epochs != 1 and getattr(data.loader, "is_endless", False):
        raise ConfigError(
            f"train.num_epochs={config.train.num_epochs} has no effect, because the data of this "
            "run has no end. Set the number of epochs with --epochs."
        )
