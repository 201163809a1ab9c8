"""Names of a BERT-like encoder's tensors in published checkpoints."""

from __future__ import annotations

from bmforge.models.weights import WeightRule, linear_rules

__all__ = ["encoder_rules"]


def encoder_rules(prefix: str) -> list[WeightRule]:
    """Map parameter names of embeddings and blocks to those of BERT-like transformers models."""
    block, published = "layers.{i}.", f"{prefix}encoder.layer.{{i}}."
    embeddings = f"{prefix}embeddings."
    modules = {
        "embed_norm": f"{embeddings}LayerNorm",
        f"{block}attn.q_proj": f"{published}attention.self.query",
        f"{block}attn.k_proj": f"{published}attention.self.key",
        f"{block}attn.v_proj": f"{published}attention.self.value",
        f"{block}attn.o_proj": f"{published}attention.output.dense",
        f"{block}attn_norm": f"{published}attention.output.LayerNorm",
        f"{block}mlp.up_proj": f"{published}intermediate.dense",
        f"{block}mlp.down_proj": f"{published}output.dense",
        f"{block}mlp_norm": f"{published}output.LayerNorm",
    }
    tables = {
        "embed": f"{embeddings}word_embeddings",
        "embed_positions": f"{embeddings}position_embeddings",
        "embed_segments": f"{embeddings}token_type_embeddings",
    }
    return linear_rules(tables, ("weight",)) + linear_rules(modules)
