"""BMCook's pruning: zeros by groups of four, or gates on parts of blocks; for many models."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.bmcook.addresses import modules_with
from bmforge.compat.bmcook.config import pattern_of, structure_table
from bmforge.compress import Method
from bmforge.compress.prune import PruneConfig, prune
from bmforge.compress.prune.structure import StructureMethod
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.errors import ConfigError
from bmforge.models import Model

__all__ = ["BMPrune", "pruning_of"]

_SLOT = "_bmcook_pruning"


class _Pruning:
    """What prunes one model.

    Args:
        method: zeros or gates.
        owner: the model, or the one of the zoo in it, that the method works on.
        is_gated: it is gates.
    """

    def __init__(self, method: Method, owner: nn.Module, is_gated: bool) -> None:
        self.method, self.owner, self.is_gated, self.step = method, owner, is_gated, 0

    def lagrangian(self) -> Tensor | None:
        """Return what drives gates to their target."""
        return self.method.extra_loss(self.owner, self.step) if self.is_gated else None

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Go on after the optimizer's step."""
        self.step += 1
        self.method.after_step_(self.owner, self.step)


class BMPrune:
    """Makes weights zeros, or puts gates on parts, and keeps them through an optimizer's steps."""

    _waiting: weakref.ref[nn.Module] | None = None

    @classmethod
    def compute_mask(cls, model: nn.Module, config: Any) -> None:
        """Do what a config says to a model.

        Args:
            model: any; for gates one of ModelCenter's classes or the zoo's.
            config: a `ConfigParser`.

        Raises:
            ConfigError: it is pruned already, a part of a name that is in none, or sizes that
                groups of four do not fit.
        """
        section = config.get("pruning")
        if not section["is_pruning"]:
            return
        if _SLOT in model.__dict__:
            raise ConfigError("this model is pruned already: compute_mask is called once for each.")
        if section["mask_method"] == "sprune":
            owner = _zoo_model(model)
            method: Method = StructureMethod(StructureConfig(**_tuples(section["sprune"])))
            method.attach_(owner)
            found = _Pruning(method, owner, True)
        else:
            names = section["pruned_module"]
            where = tuple(modules_with(model, names, "pruning.pruned_module"))
            settings = PruneConfig(pattern=pattern_of(section["mask_method"]), where=where)
            found = _Pruning(prune(model, settings), model, False)
        model.__dict__[_SLOT] = found
        cls._waiting = weakref.ref(model)

    @classmethod
    def set_optim_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Let zeros and gates go along with an optimizer: that of the last model that was pruned.

        Args:
            optimizer: of that model's parameters.
        """
        model = None if cls._waiting is None else cls._waiting()
        if model is None:
            return
        cls._waiting = None
        found = pruning_of(model)
        assert found is not None
        if optimizer is None:
            raise ConfigError("the config prunes, and no optimizer was given.")
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [p for p in found.owner.parameters() if p.requires_grad and id(p) not in known]
        if found.is_gated and new:  # the gates, which came after the optimizer was made
            optimizer.add_param_group({"params": new, "lr": 0.1, "weight_decay": 0.0})
        optimizer.register_step_post_hook(found.after_step)


def pruning_of(model: nn.Module) -> _Pruning | None:
    """Return what prunes a model; None where nothing does."""
    found: _Pruning | None = model.__dict__.get(_SLOT)
    return found


def _tuples(section: Any) -> dict[str, Any]:
    table = structure_table(section)
    return {**table, "gates": tuple(table["gates"])}


def _zoo_model(model: nn.Module) -> nn.Module:
    """Return the model of the zoo, which one of ModelCenter's classes has inside."""
    if isinstance(model, Model):
        return model
    inner = getattr(model, "model", None)
    if isinstance(inner, Model):
        return inner
    raise ConfigError(
        f"mask_method='sprune' needs a model of ours, or of ModelCenter's classes; not a "
        f"{type(model).__name__}."
    )
