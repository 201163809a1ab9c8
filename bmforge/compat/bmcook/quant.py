"""BMCook's quantization-aware training, with int8 products in forward and backward."""

from __future__ import annotations

from typing import Any

from torch import nn

from bmforge.compat.bmcook.addresses import modules_with
from bmforge.compress.quantize import FakeQuantize, QuantizeConfig
from bmforge.errors import ConfigError
from bmforge.nn.low_rank import linear_sizes
from bmforge.surgery import find_repeated_blocks

__all__ = ["BMQuant"]


class BMQuant:
    """Converts linear layers to int8 computation for training."""

    @classmethod
    def quantize(
        cls, model: nn.Module, config: Any, target_linear: type[nn.Module] | None = None
    ) -> FakeQuantize | None:
        """Convert the linear layers that a config names to int8 computation.

        Args:
            model: any model.
            config: a `ConfigParser`.
            target_linear: class of the layers to convert (default: every kind of linear layer; in
                a model with repeated blocks, only the layers inside these blocks).

        Returns:
            the `FakeQuantize` method that was applied; None if the config disables quantization.

        Raises:
            ConfigError: a pattern matches no module name, or no layer matches all conditions.
        """
        section = config.get("quantization")
        if not section["is_quant"]:
            return None
        where: tuple[str, ...] = ()
        if section["quantized_module"]:
            names = section["quantized_module"]
            where = tuple(modules_with(model, names, "quantization.quantized_module"))
        elif target_linear is None and not find_repeated_blocks(model):
            where = tuple(n for n, m in model.named_modules() if linear_sizes(m) is not None)
        if target_linear is not None:
            layers = [n for n, m in model.named_modules() if isinstance(m, target_linear)]
            where = tuple(name for name in layers if not where or name in where)
            if not where:
                raise ConfigError(
                    f"the model has no {target_linear.__name__} to quantize. Pass the class of its "
                    "linear layers as quant_layer_cls."
                )
        method = FakeQuantize(
            QuantizeConfig(scheme="int8-dynamic", training="int8-both", where=where)
        )
        method.attach_(model)
        return method
