"""Text encoder, the base class of Bert, Roberta, Longformer and ModernBert.

A family's file contains its config, a map of weight names and an `EncoderSpec`; see `bert.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.device import reads_without_sync
from bmforge.errors import ConfigError, ShapeError
from bmforge.models.base import Model
from bmforge.models.encoder_config import EncoderConfig
from bmforge.models.encoder_heads import (
    DeepClassifier,
    MaskedHead,
    PredictionClassifier,
    mean_of_tokens,
)
from bmforge.models.encoder_names import encoder_rules
from bmforge.models.heads import check_logits_at, finish_classes, finish_spans, pick_states
from bmforge.models.output import ModelOutput
from bmforge.models.stack import (
    StackSpec,
    build_layers,
    given_inputs,
    rope_tables,
    run_layers,
    span_of,
)
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
    build_mask,
    build_norm,
)
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.prompt import with_prompt

__all__ = ["EncoderModel", "EncoderSpec", "encoder_block", "encoder_rules"]


@dataclass(frozen=True)
class EncoderSpec(StackSpec):
    """Hyperparameters of an encoder: its blocks, embedding and head.

    Args:
        position_offset: index of the first position's row in the position table. If above 0,
            positions count only tokens, not padding, and padding uses the row before the first.
        embed_dropout: dropout probability after the embedding.
        classifier_dropout: dropout probability before a classifier.
        head_activation: activation of the masked-LM head.
        head_bias: whether the first layer of the masked-LM head or of a prediction head has a bias.
        deep_classifier: classify sequences with two layers instead of a pooler and one layer.
        prediction_head: every classifier is a `PredictionClassifier`, without a pooler.
        rope: parameters of RoPE, used instead of position and segment embeddings; None to use the
            embeddings.
        local_rope: parameters of RoPE in the layers with `AttentionSpec.rotary` "local".
        final_norm: norm after the last block.
    """

    position_offset: int = 0
    embed_dropout: float = 0.0
    classifier_dropout: float = 0.0
    head_activation: str = "gelu"
    head_bias: bool = True
    deep_classifier: bool = False
    prediction_head: bool = False
    rope: RopeSpec | None = None
    local_rope: RopeSpec | None = None
    final_norm: bool = False


def encoder_block(config: EncoderConfig, **attention: Any) -> BlockSpec:
    """Return the spec of a post-norm block; `attention` overrides its attention fields."""
    attn = AttentionSpec(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        dropout=config.attn_dropout,
        causal=False,
        **attention,
    )
    return BlockSpec(
        config.hidden_size,
        attn,
        MLPSpec(config.intermediate_size, config.activation),
        norm=NormSpec("layer", config.norm_eps),
        norm_place="post",
        residual_dropout=config.dropout,
    )


class EncoderModel(Model):
    """Text encoder: embeddings, blocks and a head.

    Args:
        config: config of the family.
        spec: hyperparameters derived from the config.
    """

    family_traits = Traits("bidirectional", "masked tokens", "learned")
    tied_head = ("mlm_head.decoder.weight", "embed.weight")

    def __init__(self, config: EncoderConfig, spec: EncoderSpec) -> None:
        super().__init__(config)
        self.spec = spec
        size, rows = config.hidden_size, config.max_seq_len + spec.position_offset
        # Padding rows get no gradient, as in transformers.
        before = spec.position_offset - 1 if spec.position_offset else None
        self.embed = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.embed_positions = self.embed_segments = None
        if spec.rope is None:
            self.embed_positions = nn.Embedding(rows, size, padding_idx=before)
            self.embed_segments = nn.Embedding(config.num_segments, size)
        self.embed_norm = build_norm(spec.block.norm, size)
        self.layers = build_layers(spec.block, config.num_layers, spec.blocks)
        self.norm = build_norm(spec.block.norm, size) if spec.final_norm else None
        self._build_head()

    def _build_head(self) -> None:
        config, spec = self.config, self.spec
        size, pooled = config.hidden_size, config.head == "sequence_classification"
        self.pooler = None
        has_pooler = config.head == "none" or (pooled and not spec.deep_classifier)
        if has_pooler and not spec.prediction_head:
            self.pooler = nn.Linear(size, size)
        if config.head == "masked_lm":
            self.mlm_head = MaskedHead(
                config, spec.head_activation, spec.block.norm, spec.head_bias
            )
            if config.tie_word_embeddings:
                self.mlm_head.decoder.weight = self.embed.weight
        elif pooled and spec.deep_classifier:
            self.classifier: nn.Module = DeepClassifier(
                size, config.num_labels, spec.classifier_dropout
            )
        elif config.head != "none":
            width = 2 if config.head == "question_answering" else config.num_labels
            self.classifier = self._build_classifier(width)

    def _build_classifier(self, width: int) -> nn.Module:
        spec, size = self.spec, self.config.hidden_size
        if not spec.prediction_head:
            return nn.Linear(size, width)
        return PredictionClassifier(
            size,
            width,
            spec.head_activation,
            spec.block.norm,
            spec.head_bias,
            spec.classifier_dropout,
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        output_hidden_states: bool = False,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits_at: Tensor | None = None,
        **extra: Any,
    ) -> ModelOutput:
        """Encode a text and apply the head.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding; or a 4-D mask over pairs of tokens.
            token_type_ids: segment type of every token (default: 0).
            position_ids: row indices of the position table, or positions for RoPE (default:
                counted).
            document_ids: index of each token's document in packed sequences; tokens attend within
                their document.
            labels: for the masked-LM head, ids of the masked tokens (-100 is ignored); returns
                the loss instead of logits. For a classifier, see `classification_loss`.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            output_hidden_states: return the outputs of the embedding and of every layer.
            start_positions: first token of the answers (question answering).
            end_positions: last token of the answers.
            inputs_embeds: token embeddings in place of `input_ids`; positions then count all
                tokens.
            cache: KV cache of earlier tokens, which do not attend to the new tokens; needs a
                4-D mask.
            logits_at: positions, per sequence, whose logits are returned; None for all.
            extra: further arguments of `build_masks` in some families.

        Shape:
            input_ids, token_type_ids, document_ids: (B, T); attention_mask: (B, T) or
            (B, 1, T, past + T); position_ids: (B or 1, T); labels: (B, T) or (B,);
            start_positions, end_positions: (B,); inputs_embeds: (B, T, D); logits_at: (B, M)

        Raises:
            ShapeError: there are too many positions, ids are outside of the vocabulary, or not
                exactly one of ids and embeddings is given.
        """
        inputs = given_inputs(input_ids, inputs_embeds)
        check_logits_at(self.config.head, labels, logits_at)
        masks = self.build_masks(inputs, attention_mask, document_ids, **extra)
        span = span_of(self.layers)
        if position_ids is None and cache is not None:
            position_ids = self._count_positions(inputs) + cache.length
        if span.first:
            (x,) = self.stage_inputs
        else:
            x = self.embed_inputs(input_ids, inputs_embeds)
            x = self._begin(x, inputs, token_type_ids, position_ids)
        tables = self._rope_tables(inputs, position_ids, x.dtype)
        x, states = run_layers(self.layers, x, masks, output_hidden_states, cache=cache, **tables)
        if span.last < span.total:
            return ModelOutput(stage_outputs=(x,))
        x = x if self.norm is None else self.norm(x)
        out = ModelOutput(
            last_hidden_state=x,
            hidden_states=(*states[:-1], x) if output_hidden_states else None,
        )
        head = self.config.head
        if head == "masked_lm":
            return self._predict(out, x, labels, num_items_in_batch, logits_at)
        if head == "none":
            return out._replace(pooler_output=self._pool(x))
        if head == "question_answering":
            logits = self.classifier(x)
            return finish_spans(out, logits, start_positions, end_positions, num_items_in_batch)
        if head == "sequence_classification":
            x = self._pool(x, attention_mask)
        dropout = 0.0 if self.spec.prediction_head else self.spec.classifier_dropout
        logits = self.classifier(F.dropout(x, dropout, self.training) if dropout else x)
        return finish_classes(out, logits, labels, self.config.problem_type, num_items_in_batch)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pooling: Literal["mean", "cls"] = "mean",
        normalize: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """Return one embedding per sequence, for a model with any head.

        Rows of a soft prompt are excluded.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding, which is excluded from the mean.
            pooling: "mean" of the tokens' states, or "cls" for the first token's state.
            normalize: scale embeddings to length 1.
            inputs: `token_type_ids`, `position_ids` and further arguments of `build_masks`.

        Shape:
            input_ids, attention_mask: (B, T); returns (B, D)

        Raises:
            ConfigError: the pooling is unknown, or `position_ids` are given with a soft prompt.
        """
        if pooling not in ("mean", "cls"):
            raise ConfigError(f"unknown pooling: pooling={pooling!r} (supported: mean, cls).")
        segments, positions = inputs.pop("token_type_ids", None), inputs.pop("position_ids", None)
        ids, mask, added = with_prompt(self.embed, input_ids, attention_mask)
        if added and positions is not None:
            raise ConfigError(
                f"position_ids do not cover the {added} soft prompt tokens. Leave position_ids out."
            )
        if added and segments is not None:
            segments = F.pad(segments, (added, 0), value=0)
        masks = self.build_masks(ids, mask, None, **inputs)
        x = self._begin(self.embed_inputs(ids), ids, segments, positions)
        x, _ = run_layers(
            self.layers, x, masks, False, **self._rope_tables(ids, positions, x.dtype)
        )
        x = x if self.norm is None else self.norm(x)
        x = x[:, added:]
        x = x[:, 0] if pooling == "cls" else mean_of_tokens(x, attention_mask)
        return F.normalize(x, dim=-1) if normalize else x

    def build_masks(
        self, inputs: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None
    ) -> dict[int | None, Any]:
        """Return a dict from window size to attention mask; `inputs` are ids or embeddings."""
        attentions: Any = (layer.attn for layer in self.layers.values())
        windows = {None, *(attn.window for attn in attentions if attn is not None)}
        if attention_mask is not None and attention_mask.dim() == 4:
            return dict.fromkeys(windows, attention_mask.bool())
        return {
            window: build_mask(
                (inputs.shape[0], inputs.shape[1]),
                inputs.device,
                attention_mask=attention_mask,
                document_ids=document_ids,
                causal=False,
                window=window,
            )
            for window in windows
        }

    def _rope_tables(
        self, inputs: Tensor, positions: Tensor | None, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return a dict with the rotary tables of the layers; {} if the family has no RoPE."""
        if self.spec.rope is None:
            return {}
        positions = self._count_positions(inputs) if positions is None else positions
        return rope_tables(self.spec, positions, dtype)

    def _begin(
        self, x: Tensor, inputs: Tensor, segments: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Add position and segment embeddings, if any, to token embeddings; normalize the sum.

        Args:
            x: token embeddings.
            inputs: token ids or embeddings passed by the caller.
            segments: segment type of every token.
            positions: row indices of the position table.
        """
        if self.embed_positions is not None and self.embed_segments is not None:
            self._check_length(x.shape[1])
            if positions is None:
                positions = self._count_positions(inputs)
            if segments is None:
                segments = torch.zeros(1, dtype=torch.long, device=x.device)
            x = x + (self.embed_positions(positions) + self.embed_segments(segments))
        x = self.embed_norm(x)
        dropout = self.spec.embed_dropout
        return F.dropout(x, dropout, self.training) if dropout else x

    def _count_positions(self, inputs: Tensor) -> Tensor:
        """Return the default row indices of the position table as a (B or 1, T) tensor."""
        offset = self.spec.position_offset
        if not offset or inputs.dim() == 3:
            return torch.arange(inputs.shape[1], device=inputs.device)[None] + offset
        real = (inputs != self.config.pad_token_id).int()
        return (real.cumsum(1) * real).long() + (offset - 1)

    def _check_length(self, length: int) -> None:
        if length > self.config.max_seq_len:
            raise ShapeError(
                f"the input has {length} tokens (allowed: at most max_seq_len="
                f"{self.config.max_seq_len}). Truncate it, or use a model with a larger limit."
            )

    def _pool(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return (B, D): the pooled state of the first token, or the mean state of all tokens."""
        if getattr(self.config, "classifier_pooling", "cls") == "mean":
            return mean_of_tokens(x, attention_mask)
        first = x[:, 0]
        return first if self.pooler is None else torch.tanh(self.pooler(first))

    def _predict(
        self,
        out: ModelOutput,
        x: Tensor,
        labels: Tensor | None,
        num_items: float | Tensor | None,
        logits_at: Tensor | None,
    ) -> ModelOutput:
        """Apply the masked-LM head: return the loss if there are labels, otherwise logits."""
        decoder = self.mlm_head.decoder
        if labels is None:
            return out._replace(logits=decoder(self.mlm_head(pick_states(x, None, logits_at))))
        x, labels = x.flatten(0, 1), labels.flatten()
        if reads_without_sync(labels):
            # The head, a fifth of a base model's compute, runs on masked tokens only.
            masked = (labels != IGNORE_INDEX).nonzero()[:, 0]
            x, labels = x[masked], labels[masked]
        return out._replace(loss=decoder(self.mlm_head(x), labels, num_items))

    def all_rules(self) -> list[WeightRule]:
        """Map all parameter names to names in checkpoints; an untied decoder has its own bias."""
        rules = super().all_rules()
        if self.config.head != "masked_lm" or self.config.tie_word_embeddings:
            return rules
        weight = next(r.source for r in rules if r.parameter == "mlm_head.decoder.weight")
        bias = WeightRule("mlm_head.decoder.bias", weight.removesuffix("weight") + "bias")
        return [bias if rule.parameter == bias.parameter else rule for rule in rules]

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        rules = encoder_rules(self.hf_prefix)
        if self.config.head == "none":
            rules += linear_rules({"pooler": f"{self.hf_prefix}pooler.dense"})
        return rules
