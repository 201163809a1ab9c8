"""BitFit: trained biases on linear layers and norms."""

from __future__ import annotations

from torch import nn

from bmforge.nn.moe import Experts
from bmforge.tune.delta.delta import Delta

__all__ = ["BitFit"]


class BitFit(Delta):
    """Trained bias added to a module's output, equivalent to training the module's own bias.

    It has no options. Stacked experts have no biases; they share one trained bias, which is added
    to the output of the MoE layer.

    Source: Ben Zaken et al., "BitFit" (2021).
    """

    kind = "shift"
    default_targets = (
        "attn.q",
        "attn.k",
        "attn.v",
        "attn.o",
        "cross_attn.q_proj",
        "cross_attn.k_proj",
        "cross_attn.v_proj",
        "cross_attn.o_proj",
        # Names of cross-attention projections in transformers.
        "[r](encoder_attn|EncDecAttention|crossattention)\\.(\\w+\\.)?"
        "([qkvo](_proj)?|out_proj|query|key|value|dense|[cq]_attn|c_proj)$",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
        "norm",
        "lm_head",
    )
    stands_behind = True
    peft_type = "BMFORGE_BITFIT"

    def _is_usual(self, module: nn.Module) -> bool:
        return True if isinstance(module, Experts) else any(True for _ in module.parameters())
