"""LoRA: low-rank updates of linear layers, embeddings, output heads and stacked experts."""

from __future__ import annotations

from types import MappingProxyType

from bmforge.tune.delta.delta import Delta

__all__ = ["LoRA", "Lora"]


class Lora(Delta):
    """LoRA adapter: a low-rank update ``alpha / rank * B A x`` added to a layer's output.

    Options: those of `nn.low_rank.LowRankOptions`; `use_rslora` (`root_scale`) scales by
    ``alpha / sqrt(rank)``, `use_dora` (`magnitude`) trains the magnitudes of weight rows, `bias`
    adds a bias to B; `ranks` and `alphas` override the rank and alpha of modules by glob.

    Source: Hu et al., "LoRA: Low-rank adaptation of large language models" (2021).
    """

    kind = "low_rank"
    default_targets = ("attn.q", "attn.v")
    defaults = MappingProxyType({"rank": 8, "alpha": 16.0})
    peft_options = MappingProxyType({"use_rslora": "root_scale", "use_dora": "magnitude"})
    peft_type = "LORA"


LoRA = Lora
