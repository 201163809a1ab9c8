"""BMCook's trainer, which sets up all compression methods of a config in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.bmcook.pruning import BMPrune, pruning_of
from bmforge.compat.bmcook.training_methods import BMDistill, BMMoE, BMQuant, Teaching, logits_of
from bmforge.errors import ConfigError

__all__ = ["CookOutput", "CookTrainer"]

_SLOT = "_bmcook_forward"


class CookOutput:
    """Output of a forward call.

    Args:
        loss: task loss plus `d_loss` and, while gates are trained, `lag_loss`.
        original_output: output of the model.

    Attributes:
        d_loss: distillation loss.
        lag_loss: Lagrangian loss of the gates.
        moe_records: dict from module name to recorded output.
    """

    def __init__(self, loss: Tensor, original_output: Any) -> None:
        self.loss, self.original_output = loss, original_output
        self.d_loss: Any = 0.0
        self.lag_loss: Any = 0.0
        self.moe_records: dict[str, Tensor] = {}


class CookTrainer:
    """Sets up compression methods for a model that is trained in the program's own loop."""

    @staticmethod
    def forward(
        model: nn.Module, loss_func: Callable[..., Tensor], targets: Tensor, *args: Any, **kw: Any
    ) -> CookOutput:
        """Run a model and compute the total loss.

        Args:
            model: model that `set_compression` has prepared.
            loss_func: (logits (tokens, V), targets (tokens,)) -> loss, with V the vocabulary size.
            targets: target ids.
            args, kw: arguments of the model.

        Raises:
            ConfigError: the model was not prepared.
        """
        prepared = model.__dict__.get(_SLOT)
        if prepared is None:
            raise ConfigError(
                f"this {type(model).__name__} has no compression. Call "
                "CookTrainer.set_compression(config, model, ...) first."
            )
        out: CookOutput = prepared(model, loss_func, targets, *args, **kw)
        return out

    @classmethod
    def set_compression(
        cls,
        cook_config: Any,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        teacher: nn.Module | None = None,
        quant_layer_cls: type[nn.Module] | None = None,
    ) -> None:
        """Set up the compression of a model; several models can be set up one after another.

        Args:
            cook_config: a `ConfigParser`.
            model: model to compress.
            optimizer: optimizer of the model's parameters.
            teacher: teacher for distillation, which gets the same inputs.
            quant_layer_cls: class of the layers to quantize (default: every kind of linear
                layer in the repeated blocks).

        Raises:
            ConfigError: `model` is None, the model is prepared already, or a setting is invalid or
                not supported for this model.
        """
        if model is None:
            raise ConfigError(
                "set_compression was called without a model. Pass the model to compress."
            )
        if _SLOT in model.__dict__:
            raise ConfigError(
                f"this {type(model).__name__} is already prepared. Call set_compression once per "
                "model."
            )
        BMPrune.compute_mask(model, cook_config)
        if optimizer is not None or pruning_of(model) is not None:
            BMPrune.set_optim_for_pruning(optimizer)  # type: ignore[arg-type]
        forward = BMDistill.set_forward(model, teacher, _forward, cook_config)
        _train_projections(forward, optimizer)
        BMQuant.quantize(model, cook_config, quant_layer_cls)
        model.__dict__[_SLOT] = BMMoE.get_hidden(model, cook_config, forward)


def _train_projections(forward: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Add the hidden-state projections to the optimizer; BMCook itself does not train them."""
    teaching = getattr(getattr(forward, "func", None), "__self__", None)
    if not isinstance(teaching, Teaching) or not len(teaching.projections):
        return
    if optimizer is None:
        raise ConfigError(
            "mse_hidn_proj trains projections, which need an optimizer. Pass optimizer= to "
            "set_compression."
        )
    optimizer.add_param_group({"params": list(teaching.projections.parameters())})


def _forward(
    model: nn.Module, loss_func: Callable[..., Tensor], targets: Tensor, *args: Any, **kw: Any
) -> CookOutput:
    """Run a model and compute the task loss."""
    result = model(*args, **kw)
    logits = logits_of(result)
    loss = loss_func(logits.view(-1, logits.shape[-1]), targets.view(-1))
    out = CookOutput(loss, result)
    pruning = pruning_of(model)
    extra = None if pruning is None or not model.training else pruning.lagrangian()
    if extra is not None:
        out.loss, out.lag_loss = out.loss + extra, extra
    return out
