"""ModelCenter's variant of CPM-1, with T5's relative positions and gated MLPs.

All tokens attend to context tokens; attention to other tokens is causal.

Source: ModelCenter's `model/cpm1.py` and `model/config/cpm1_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models import ModelConfig, ModelOutput
from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.stack import given_inputs, run_layers
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec
from bmforge.nn.relative import RelativeBias

__all__ = ["RelativeCPM1", "RelativeCPM1Config"]


@dataclass(kw_only=True)
class RelativeCPM1Config(ModelConfig):
    """Config of ModelCenter's CPM-1 variant; see `ModelConfig` for the other fields.

    Args:
        num_buckets: number of distance buckets.
        max_distance: distance from which all distances in one direction share the last bucket.
        dropout: dropout probability of every dropout layer.
    """

    family: ClassVar[str] = "model_center_cpm1"
    heads: ClassVar[dict[str, Head]] = {"language_model": Head("CPM1"), "none": Head("CPM1")}
    hf_names: ClassVar[dict[str, str]] = {}

    vocab_size: int = 30968
    hidden_size: int = 768
    intermediate_size: int = 1920
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 0
    head_dim: int = 64
    max_seq_len: int = 1024
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.0

    @property
    def is_gated(self) -> bool:
        """True, as the MLP has a gate."""
        return True


class RelativeCPM1(CausalLM):
    """ModelCenter's variant of CPM-1, with an untied language-model head."""

    config_class = RelativeCPM1Config
    family_traits = Traits("causal", "next token", "relative")

    def __init__(self, config: RelativeCPM1Config) -> None:
        attn = AttentionSpec(
            config.num_heads,
            config.num_heads,
            config.head_dim,
            qkv_bias=False,
            out_bias=False,
            scale=1.0,
            dropout=config.dropout,
            causal=False,
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            MLPSpec(config.intermediate_size, "gelu", True, False, config.dropout),
            norm=NormSpec("rms", config.norm_eps),
            residual_dropout=config.dropout,
        )
        super().__init__(config, DecoderSpec(block, learned_positions=False))
        self.rel_bias = RelativeBias(config.num_heads, config.num_buckets, config.max_distance)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        cache: Any = None,
        output_hidden_states: bool = False,
        inputs_embeds: Tensor | None = None,
    ) -> ModelOutput:
        """Return the hidden states; the arguments are those of `CausalLM`.

        Shape:
            input_ids: (B, T); attention_mask: pairwise mask (B, 1, T, past + T)
        """
        length = given_inputs(input_ids, inputs_embeds).shape[1]
        past = 0 if cache is None else cache.length
        x = self.embed_inputs(input_ids, inputs_embeds)
        bias = self.rel_bias(length, past + length, past)
        masks: dict[int | None, Tensor | None] = {None: attention_mask}
        x, states = run_layers(self.layers, x, masks, output_hidden_states, bias=bias, cache=cache)
        assert self.norm is not None
        x = self.norm(x)
        layer_states = (*states[:-1], x) if output_hidden_states else None
        return ModelOutput(last_hidden_state=x, hidden_states=layer_states)

    def weight_rules(self) -> list[WeightRule]:
        """Raise an error, since no other project has checkpoints of this model.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "ModelCenter's own CPM1, with relative positions, has no format in transformers. "
            "Save it with bmt.save(model, file) and config.to_json_file(file)."
        )
