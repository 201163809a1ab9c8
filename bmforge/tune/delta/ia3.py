"""IA3: trained per-channel factors on keys, values and the MLP's hidden activations."""

from __future__ import annotations

from torch import nn

from bmforge.nn.low_rank import linear_sizes
from bmforge.tune.delta.delta import Delta

__all__ = ["IA3"]


class IA3(Delta):
    """Trained per-channel factors on the outputs of layers, or on the inputs of layers in `into`.

    The option `into` lists name endings of modules whose inputs are scaled. Stacked experts are not
    supported.

    Source: Liu et al., "Few-shot parameter-efficient fine-tuning is better and cheaper than
    in-context learning" (2022).
    """

    kind = "gain"
    default_targets = ("attn.k", "attn.v", "mlp.down")
    peft_type = "IA3"

    def _find_target_names(self) -> list[str]:
        names = super()._find_target_names()
        if "into" not in self.options:
            last = ("down_proj", "output.dense", "wo", "mlp.c_proj", "fc2", "lin2", "fc_out")
            self.options["into"] = [n for n in names if n.endswith(last)]
        return names

    def _is_usual(self, module: nn.Module) -> bool:
        return linear_sizes(module) is not None
