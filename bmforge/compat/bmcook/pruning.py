"""BMCook's pruning of one or more models: 2:4 sparsity, or structured pruning with gates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.bmcook.addresses import modules_with
from bmforge.compat.bmcook.block_gates import OwnBlocksMethod
from bmforge.compat.bmcook.config import pattern_of, structure_table
from bmforge.compress import Method
from bmforge.compress.prune import PruneConfig, prune
from bmforge.compress.prune.gates import find_gates
from bmforge.compress.prune.structure import StructureMethod
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.errors import ConfigError
from bmforge.models import Model

__all__ = ["BMPrune", "pruning_of"]

_SLOT = "_bmcook_pruning"


class _Pruning:
    """Pruning state of one model.

    Args:
        method: sparsity or structured pruning method.
        owner: model that is pruned, or the bmforge model inside it.
        is_gated: True for structured pruning.
    """

    def __init__(self, method: Method, owner: nn.Module, is_gated: bool) -> None:
        self.method, self.owner, self.is_gated, self.step = method, owner, is_gated, 0

    def lagrangian(self) -> Tensor | None:
        """Return the Lagrangian loss that drives gates to their target; None without gates."""
        return self.method.extra_loss(self.owner, self.step) if self.is_gated else None

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Update masks or gates after an optimizer step."""
        self.step += 1
        self.method.after_step_(self.owner, self.step)


class BMPrune:
    """Prunes weights or adds pruning gates, and updates them during training."""

    _waiting: weakref.ref[nn.Module] | None = None

    @classmethod
    def compute_mask(cls, model: nn.Module, config: Any) -> None:
        """Prune a model according to a config.

        Args:
            model: any model; structured pruning needs a bmforge model, one of ModelCenter's
                classes, or blocks with the submodules of ModelCenter's layers.
            config: a `ConfigParser`.

        Raises:
            ConfigError: the model is pruned already, a pattern matches no module name, or a
                size is not divisible by 4.
        """
        section = config.get("pruning")
        if not section["is_pruning"]:
            return
        if _SLOT in model.__dict__:
            raise ConfigError(
                "this model is already pruned. Call compute_mask only once for each model."
            )
        if section["mask_method"] == "sprune":
            owner = _zoo_model(model)
            kind = OwnBlocksMethod if owner is None else StructureMethod
            method: Method = kind(StructureConfig(**_tuples(section["sprune"])))
            pruning = _Pruning(method, owner or model, True)
            method.attach_(pruning.owner)
        else:
            names = section["pruned_module"]
            where = tuple(modules_with(model, names, "pruning.pruned_module"))
            settings = PruneConfig(pattern=pattern_of(section["mask_method"]), where=where)
            pruning = _Pruning(prune(model, settings), model, False)
        model.__dict__[_SLOT] = pruning
        cls._waiting = weakref.ref(model)

    @classmethod
    def set_optim_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Update the masks or gates of the last pruned model after each step of its optimizer.

        Args:
            optimizer: optimizer of that model's parameters.
        """
        model = None if cls._waiting is None else cls._waiting()
        if model is None:
            return
        cls._waiting = None
        pruning = pruning_of(model)
        assert pruning is not None
        if optimizer is None:
            raise ConfigError(
                "pruning needs an optimizer. Pass it to set_compression or set_optim_for_pruning."
            )
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [gate.delta for gate in find_gates(pruning.owner) if id(gate.delta) not in optimized]
        if new:  # gates were created after the optimizer
            optimizer.add_param_group({"params": new, "lr": 0.1, "weight_decay": 0.0})
        optimizer.register_step_post_hook(pruning.after_step)


def pruning_of(model: nn.Module) -> _Pruning | None:
    """Return the pruning state of a model; None if it is not pruned."""
    pruning: _Pruning | None = model.__dict__.get(_SLOT)
    return pruning


def _tuples(section: Any) -> dict[str, Any]:
    table = structure_table(section)
    return {**table, "gates": tuple(table["gates"])}


def _zoo_model(model: nn.Module) -> Model | None:
    """Return `model` if it is a bmforge model, or the one that it wraps; None if neither."""
    inner = model if isinstance(model, Model) else getattr(model, "model", None)
    return inner if isinstance(inner, Model) else None
