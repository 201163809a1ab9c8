"""LoRA: low-rank updates of linear layers, embeddings, output heads and stacked experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bmforge.tune.delta.address import find_places
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.records import embedding_name

__all__ = ["LoRA", "Lora"]


class Lora(Delta):
    """LoRA adapter: a low-rank update ``alpha / rank * B A x`` added to a layer's output.

    The options are those of `nn.low_rank.LowRankOptions`: `use_rslora` scales by ``alpha /
    sqrt(rank)``, `use_dora` trains the magnitudes of weight rows, `bias` adds a bias to B; `ranks`
    and `alphas` are dicts from name glob to rank and alpha.
    `trainable_token_indices` also trains the embedding rows of some tokens: a list of token ids, or
    a dict from the name of an embedding or head to such a list; tied layers share the rows.

    Source: Hu et al., "LoRA: Low-rank adaptation of large language models" (2021).
    """

    kind = "low_rank"
    default_targets = ("attn.q", "attn.v")
    defaults = MappingProxyType({"rank": 8, "alpha": 16.0})
    peft_type = "LORA"

    def _complete_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options, with full names of the layers in `trainable_token_indices`."""
        completed = super()._complete_options(options)
        indices = completed.get("trainable_token_indices")
        if not indices:
            return {k: v for k, v in completed.items() if k != "trainable_token_indices"}
        if not isinstance(indices, Mapping):
            indices = {embedding_name(self.model): indices}
        names = {n: rows for key, rows in indices.items() for n in find_places(self.model, [key])}
        return {
            **completed,
            "trainable_token_indices": {
                n: list(rows) if isinstance(rows, (list, tuple)) else rows
                for n, rows in names.items()
            },
        }


LoRA = Lora
