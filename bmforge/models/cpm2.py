"""CPM-2 (Zhang et al., "CPM-2: Large-scale Cost-efficient Pre-trained Language Models", 2021).

An encoder-decoder like T5 1.1 with an untied head and unscaled attention scores. Its weight names
are those of the published Megatron shards (`src/mpu/transformer_enc_dec.py` of CPM-2-Pretrain),
which EVA shares. The third published model has experts (a BASE layer) in every block.

Not verified: the checkpoint of the third model, with one file per expert and rank, is not public.
In the original each expert has its own norm, which also normalizes the router's input. This
implementation has one norm per layer (the original's norms are initialized as copies), and weight
names contain the expert's index. The original applies dropout to the output of attention twice;
this implementation applies it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.seq2seq import Seq2Seq
from bmforge.models.seq2seq_config import Seq2SeqConfig, make_spec
from bmforge.models.sizes import LayerSizes
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import MoESpec

__all__ = ["CPM2", "CPM2Config", "megatron_rules"]


@dataclass(kw_only=True)
class CPM2Config(Seq2SeqConfig):
    """Config of CPM-2; other fields are those of `Seq2SeqConfig`.

    Args:
        num_experts: number E of experts in every block of both stacks; 0 for an MLP.
        balance_experts: in training, assign the same number of tokens to all experts, over all
            ranks. In inference, or if False, tokens are routed by argmax.
        activation: activation of the MLP's gate (default: the tanh form of GELU, as published).
    """

    family: ClassVar[str] = "cpm2"
    heads: ClassVar[dict[str, Head]] = {
        "sequence_to_sequence": Head("EncDecModel", {"lm_head.weight": "lm_head.weight"}),
        "none": Head("CPM2Model"),
    }
    hf_names: ClassVar[dict[str, str]] = {
        **Seq2SeqConfig.hf_names,
        "init_std": "init_method_std",
        "decoder_start_token_id": "decoder_start_token_id",
        "num_experts": "num_experts",
        "balance_experts": "balance_experts",
        "activation": "activation",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpm2-2.0": {"vocab_size": 26240, "eos_token_id": 7},
        "cpm2-2.1": {},
        "cpm2-moe-198b": {"num_experts": 32},
    }

    vocab_size: int = 51968
    hidden_size: int = 4096
    intermediate_size: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    init_std: float = 0.001
    decoder_start_token_id: int = 1
    eos_token_id: int = 8
    num_experts: int = 0
    balance_experts: bool = True
    activation: str = "gelu_new"

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.num_experts < 0:
            yield f"num_experts={self.num_experts} must not be negative"

    def layer_sizes(self) -> LayerSizes:
        """Return the base class's sizes and the number of experts; a token is routed to one."""
        count = self.num_experts
        return replace(super().layer_sizes(), num_experts=count, experts_per_token=min(count, 1))


class CPM2(Seq2Seq):
    """CPM-2 with a sequence-to-sequence head."""

    config_class = CPM2Config
    family_traits = Traits(
        "encoder-decoder", "spans", "relative", sentinel="<s_{}>", ends_inside=True
    )

    def __init__(self, config: CPM2Config) -> None:
        moe = None
        if config.num_experts:
            choice = "balanced" if config.balance_experts else "top_k"
            size = config.intermediate_size
            moe = MoESpec(config.num_experts, 1, size, config.activation, choice=choice)  # type: ignore[arg-type]
        super().__init__(config, make_spec(config, config.activation, scale=1.0, moe=moe))

    def init_std(self, name: str) -> float:
        """Return a parameter's initial std; residual projections are scaled by 1/sqrt(2 L).

        The rows of the router's weight are random vectors of norm about 0.1. In the original they
        are orthogonal; random vectors are nearly so.
        """
        config = self.config
        if name.endswith("rel_bias.weight"):
            return 1.0
        if name.endswith("router.weight"):
            return 0.1 * config.hidden_size**-0.5
        scaled = "o_proj" in name or "down_proj" in name
        return config.init_std / (math.sqrt(2 * config.num_layers) if scaled else 1.0)

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of each stack's embedding copy to the shared embedding's."""
        return {f"{s}.word_embeds.weight": "word_embeds.weight" for s in ("encoder", "decoder")}

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to names in checkpoints; see `megatron_rules`."""
        return megatron_rules(self.config)

    def megatron_rules(self) -> list[WeightRule]:
        """Map parameter names, including the head's, to the names in Megatron shards."""
        return self.all_rules()


def megatron_rules(config: Any) -> list[WeightRule]:
    """Map parameter names of CPM-2 or EVA to those of the published Megatron shards.

    q, k and v are fused in the shards.

    Args:
        config: a `Seq2SeqConfig`, optionally with `num_experts`.
    """
    rules = [WeightRule("embed.weight", "word_embeds.weight")]
    for stack in ("encoder", "decoder"):
        own, published = f"{stack}.layers.{{i}}.", f"{stack}.blocks.{{i}}."
        attn, cross = f"{published}self_attn.self_attn.", f"{published}cross_attn.cross_attn."
        names = {
            f"{stack}.norm": f"{stack}.final_layernorm",
            f"{stack}.rel_bias": f"{stack}.blocks.0.self_attn.self_attn.relative_attention_bias",
            f"{own}attn_norm": f"{published}self_attn.layer_norm",
            f"{own}attn.o_proj": f"{attn}dense",
        }
        rules += _fused(f"{own}attn", ("q", "k", "v"), f"{attn}project.weight", config)
        if stack == "decoder":
            names |= {
                f"{own}cross_attn_norm": f"{published}cross_attn.layer_norm",
                f"{own}cross_attn.q_proj": f"{cross}project_q",
                f"{own}cross_attn.o_proj": f"{cross}dense",
            }
            rules += _fused(f"{own}cross_attn", ("k", "v"), f"{cross}project_kv.weight", config)
        rules += linear_rules(names, ("weight",))
        rules += _feed_forward_rules(own, published, getattr(config, "num_experts", 0) > 0)
    return rules


def _fused(own: str, parts: Iterable[str], published: str, config: Any) -> list[WeightRule]:
    width, names = config.num_heads * config.head_dim, tuple(parts)
    return [
        WeightRule(f"{own}.{name}_proj.weight", published, part=(i * width, len(names) * width))
        for i, name in enumerate(names)
    ]


def _feed_forward_rules(own: str, published: str, has_experts: bool) -> list[WeightRule]:
    """Map names of the MLP or experts to names in checkpoints; experts lack ".weight" there."""
    names = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
    if not has_experts:
        modules = {f"{own}mlp.{a}": f"{published}ff.dense_relu_dense.{b}" for a, b in names.items()}
        modules[f"{own}mlp_norm"] = f"{published}ff.layer_norm"
        return linear_rules(modules, ("weight",))
    expert = f"{published}ff.expert_network."
    return [
        WeightRule(f"{own}mlp_norm.weight", f"{expert}layer_norm.weight"),
        WeightRule(f"{own}mlp.router.weight", f"{published}ff.expert_centroids"),
        *(
            WeightRule(f"{own}mlp.experts.{a}", f"{expert}{{e}}.dense_relu_dense.{b}.weight")
            for a, b in names.items()
        ),
    ]
