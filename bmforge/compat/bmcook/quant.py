"""BMCook's quantisation during training: int8 rows times int8 tokens, gradients as well."""

from __future__ import annotations

from typing import Any

from torch import nn

from bmforge.compat.bmcook.addresses import modules_with
from bmforge.compress.quantize import FakeQuantize, QuantizeConfig

__all__ = ["BMQuant"]


class BMQuant:
    """Lets linear layers multiply integers."""

    @classmethod
    def quantize(
        cls, model: nn.Module, config: Any, target_linear: type[nn.Module] | None = None
    ) -> FakeQuantize | None:
        """Let the linear layers that a config names compute with integers; None where none are.

        Args:
            model: any.
            config: a `ConfigParser`.
            target_linear: not needed: every kind of linear layer is known.

        Raises:
            ConfigError: a part of a name that is in none.
        """
        section = config.get("quantization")
        if not section["is_quant"]:
            return None
        where: tuple[str, ...] = ()
        if section["quantized_module"]:
            names = section["quantized_module"]
            where = tuple(modules_with(model, names, "quantization.quantized_module"))
        method = FakeQuantize(
            QuantizeConfig(scheme="int8-dynamic", training="int8-both", where=where)
        )
        method.attach_(model)
        return method
