"""Decoder-only language model, the base class of GPT2, Llama and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ShapeError
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig
from bmforge.models.heads import (
    check_logits_at,
    find_last_token,
    finish_classes,
    finish_spans,
    pick_states,
)
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
from bmforge.nn import (
    LMHead,
    MoESpec,
    RopeSpec,
    balance_loads,
    build_mask,
    build_norm,
    count_loads,
)
from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.shard_hooks import TensorFn, identity

__all__ = ["CausalLM", "DecoderSpec"]
_TOKEN_HEADS = ("language_model", "sequence_classification")


@dataclass(frozen=True)
class DecoderSpec(StackSpec):
    """Hyperparameters of a decoder-only model: its blocks, embedding and head.

    Args:
        rope: parameters of RoPE; None for learned absolute positions (`embed_positions`).
        local_rope: parameters of RoPE in the layers with `AttentionSpec.rotary` "local".
        learned_positions: use `embed_positions` if `rope` is None; False for score biases (ALiBi).
        num_positions: number of positions in `embed_positions`; 0 means max_seq_len.
        position_offset: index of the row of `embed_positions` for the first position.
        positions_from_mask: count only unmasked tokens for positions; padding has position -1.
        extra_tokens: number of rows of embedding and head beyond vocab_size.
        embed_size: width of the embedding, which is projected to D and back; 0 means D.
        padding_id: token whose embedding gets no gradient.
        embed_norm: norm after the embedding (Bloom).
        embed_dropout: dropout probability after the embedding.
        embed_scale: factor on the embedding.
        rounds_embed_scale: round `embed_scale` to the dtype of the embedding first (Gemma).
        final_norm: norm after the last block.
        head_bias: use a bias in the language-model head.
        head_scale: factor on the input of the language-model head.
        head_softcap: cap c of the logits z, which become ``c * tanh(z / c)``; None for no cap.
        balance_weight: weight of the experts' load-balancing loss; None disables it.
    """

    rope: RopeSpec | None = None
    local_rope: RopeSpec | None = None
    learned_positions: bool = True
    num_positions: int = 0
    position_offset: int = 0
    positions_from_mask: bool = False
    extra_tokens: int = 0
    embed_size: int = 0
    padding_id: int | None = None
    embed_norm: bool = False
    embed_dropout: float = 0.0
    embed_scale: float = 1.0
    rounds_embed_scale: bool = False
    final_norm: bool = True
    head_bias: bool = False
    head_scale: float = 1.0
    head_softcap: float | None = None
    balance_weight: float | None = None


class CausalLM(Model):
    """Decoder-only model: embedding, blocks, final norm and a head.

    Args:
        config: config of the family.
        spec: hyperparameters derived from the config.

    Attributes:
        sum_statistics: function that sums the experts' loads over the ranks of a step; parallel
            layouts replace it. None excludes the load-balancing loss.
    """

    family_traits = Traits("causal", "next token", "rotary")

    def __init__(self, config: ModelConfig, spec: DecoderSpec) -> None:
        super().__init__(config)
        self.spec = spec
        self.sum_statistics: TensorFn | None = identity
        size = spec.embed_size or config.hidden_size
        rows = config.vocab_size + spec.extra_tokens
        self.embed = nn.Embedding(rows, size, padding_idx=spec.padding_id)
        if spec.rope is None and spec.learned_positions:
            rows = (spec.num_positions or config.max_seq_len) + spec.position_offset
            self.embed_positions = nn.Embedding(rows, config.hidden_size)
        if size != config.hidden_size:
            self.project_in = nn.Linear(size, config.hidden_size, bias=False)
            self.project_out = nn.Linear(config.hidden_size, size, bias=False)
        self.embed_norm = build_norm(spec.block.norm, size) if spec.embed_norm else None
        self.layers = build_layers(spec.block, config.num_layers, spec.blocks)
        self.norm = build_norm(spec.block.norm, config.hidden_size) if spec.final_norm else None
        self._build_head(size)

    @property
    def balances(self) -> bool:
        """True if the loss includes a load-balancing loss over all tokens of a step."""
        return self.spec.balance_weight is not None

    def _build_head(self, size: int) -> None:
        config = self.config
        if config.head == "language_model":
            rows = self.embed.num_embeddings
            self.lm_head = LMHead(size, rows, bias=self.spec.head_bias)
            self.lm_head.softcap = self.spec.head_softcap
            if config.tie_word_embeddings:
                self.lm_head.weight = self.embed.weight
        elif config.head != "none":
            has_bias = "classifier.bias" in config.heads[config.head].names
            width = 2 if config.head == "question_answering" else config.num_labels
            self.classifier = nn.Linear(size, width, bias=has_bias)

    @property
    def position_limit(self) -> int | None:
        """Maximum input length in tokens with learned positions; None with RoPE."""
        learned = self.spec.rope is None and self.spec.learned_positions
        return self.config.max_seq_len - self._prefix_length() if learned else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        cache: KeyValueCache | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> ModelOutput:
        """Compute next-token logits, the loss, or the output of another head.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding, including cached tokens; or a 4-D mask
                over pairs of tokens, which replaces causal attention.
            position_ids: positions; by default counted from the cache's length.
            document_ids: index of each token's document in packed sequences; see `build_mask`.
            labels: for a language model, target ids (shifted by the model; -100 is ignored);
                returns the loss instead of logits. For a classifier, see `classification_loss`.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            cache: KV cache of earlier tokens.
            output_hidden_states: return the outputs of the embedding and of every layer.
            logits_to_keep: number of last positions whose logits are returned; None for all.
            start_positions: first token of the answers (question answering).
            end_positions: last token of the answers.
            inputs_embeds: token embeddings in place of `input_ids`.
            logits_at: positions, per sequence, whose logits are returned; None for all.

        Shape:
            input_ids, document_ids: (B, T); attention_mask: (B, past + T) or (B, 1, T, past + T);
            position_ids: (B or 1, T); labels: (B, T) or (B,); start_positions, end_positions: (B,);
            inputs_embeds: (B, T, width of the embedding); logits_at: (B, M)

        Raises:
            ShapeError: there are too many positions, ids are outside of the vocabulary, or not
                exactly one of ids and embeddings is given.
        """
        inputs = given_inputs(input_ids, inputs_embeds)
        check_logits_at(self.config.head, labels, logits_at, _TOKEN_HEADS)
        past = cache.length if cache is not None else 0
        self._check_length(past + inputs.shape[1])
        if position_ids is None:
            position_ids = self._count_positions(inputs, attention_mask, past)
        position_ids = self.positions_behind_prefix(position_ids)
        span = span_of(self.layers)
        if span.first:
            x, *routed = self.stage_inputs
        else:
            x, routed = self._embed(self.embed_inputs(input_ids, inputs_embeds), position_ids), []
        masks = self._build_masks(inputs, attention_mask, document_ids, past)
        tables = rope_tables(self.spec, position_ids, x.dtype)
        x, states = run_layers(
            self.layers, x, masks, output_hidden_states, routed, cache=cache, **tables
        )
        if span.last < span.total:
            return ModelOutput(stage_outputs=(x, *routed))
        x = self._finish(x)
        hidden_states = (*states[:-1], x) if output_hidden_states else None
        if self.config.head == "language_model":
            states = pick_states(x, logits_to_keep, logits_at) if labels is None else x
            out = self._predict(x, labels, num_items_in_batch, states, hidden_states)
            return self._balance(out, routed, attention_mask, labels, num_items_in_batch)
        out = ModelOutput(None, None, x, hidden_states, router_logits=tuple(routed) or None)
        if self.config.head == "none":
            return out
        logits = self.classifier(x)
        if self.config.head == "question_answering":
            return finish_spans(out, logits, start_positions, end_positions, num_items_in_batch)
        if logits_at is not None:
            logits = pick_states(logits, None, logits_at)
        elif self.config.head == "sequence_classification":
            last = self._pick_tokens(inputs, attention_mask)
            logits = logits[torch.arange(len(last), device=last.device), last]
        return finish_classes(out, logits, labels, self.config.problem_type, num_items_in_batch)

    def _build_masks(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        past: int,
    ) -> dict[int | None, Tensor | None]:
        """Return a dict from window size to attention mask; `inputs` are ids or embeddings."""
        if attention_mask is not None and attention_mask.dim() == 4:
            return dict.fromkeys(self._windows(), attention_mask.bool())
        return {
            window: build_mask(
                (inputs.shape[0], inputs.shape[1]),
                inputs.device,
                past=past,
                attention_mask=attention_mask,
                document_ids=document_ids,
                window=window,
            )
            for window in self._windows()
        }

    def _pick_tokens(self, inputs: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the index of the token whose logits classify each sequence, (B,)."""
        padding = getattr(self.config, "pad_token_id", self.config.raw.get("pad_token_id"))
        return find_last_token(inputs, attention_mask, padding)

    def _predict(
        self,
        x: Tensor,
        labels: Tensor | None,
        num_items: float | Tensor | None,
        states: Tensor,
        hidden_states: tuple[Tensor, ...] | None,
    ) -> ModelOutput:
        """Apply the language-model head: return the loss if there are labels, otherwise logits."""
        if labels is not None:
            loss = self.lm_head(self._scale_for_head(x), labels, num_items, shift=True)
            return ModelOutput(loss, None, x, hidden_states)
        return ModelOutput(None, self.lm_head(self._scale_for_head(states)), x, hidden_states)

    def _balance(
        self,
        out: ModelOutput,
        routed: list[Tensor],
        attention_mask: Tensor | None,
        labels: Tensor | None,
        num_items: float | Tensor | None,
    ) -> ModelOutput:
        """Add router logits and, if configured, the experts' load-balancing loss to the output.

        The loss covers all tokens over which `sum_statistics` sums. Each micro-batch and rank adds
        a part, computed from its own tokens' probabilities and scaled like its part of the main
        loss. If `num_items` is a function (`nn.Measure`), there is no balancing loss.
        """
        if not routed:
            return out
        out = out._replace(router_logits=tuple(routed))
        weight = self.spec.balance_weight
        if weight is None or self.sum_statistics is None or callable(num_items):
            return out
        # As in transformers, all unmasked tokens count, whether or not they have a label.
        counted = None if attention_mask is None or attention_mask.dim() != 2 else attention_mask
        if counted is not None and out.last_hidden_state is not None:
            counted = counted[:, -out.last_hidden_state.shape[1] :]
        share, balance, labelled, parts = self._find_balance(routed, counted, labels)
        aux_loss = balance + parts * (share - share.detach())  # gradient averaged over the parts
        if out.loss is None or labels is None:
            return out._replace(aux_loss=aux_loss)
        own_loss = aux_loss if num_items is None else share * (labelled / num_items)
        return out._replace(loss=out.loss + weight * own_loss, aux_loss=aux_loss)

    def _find_balance(
        self, routed: list[Tensor], counted: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the mean load-balancing loss of MoE layers; equal expert counts are pooled.

        Returns:
            this rank's part of the loss, the loss of all tokens, the number of labels of all ranks,
            and the number of parts (one per micro-batch and rank)
        """
        spec = self.spec
        specs = (spec.blocks.get(i, spec.block).mlp for i in range(span_of(self.layers).total))
        kinds = [(s.num_experts, s.experts_per_token) for s in specs if isinstance(s, MoESpec)]
        loads_of = {}
        for kind in dict.fromkeys(kinds):
            logits = [part for part, other in zip(routed, kinds, strict=True) if other == kind]
            loads_of[kind] = count_loads(logits, kind[1], counted)
        unit = loads_of[kinds[0]][2].new_ones(1)
        labelled = unit * (0 if labels is None else (labels[:, 1:] != IGNORE_INDEX).sum())
        local = [tensor.detach() for loads in loads_of.values() for tensor in loads]
        assert self.sum_statistics is not None
        summed = self.sum_statistics(torch.cat((*local, labelled, unit)))
        lengths = [tensor.shape[0] for tensor in local]
        *totals, labelled, parts = summed.split([*lengths, 1, 1])
        share, balance = unit.new_zeros(()), unit.new_zeros(())
        for number, (kind, (_, sums, _)) in enumerate(loads_of.items()):
            loads, all_sums, tokens = totals[3 * number : 3 * number + 3]
            weight = kinds.count(kind) / len(kinds)
            share = share + weight * balance_loads(loads, sums, tokens)
            balance = balance + weight * balance_loads(loads, all_sums, tokens)
        return share, balance, labelled.squeeze(), parts.squeeze()

    def _scale_for_head(self, x: Tensor) -> Tensor:
        """Scale the last hidden states for the language-model head."""
        return x if self.spec.head_scale == 1.0 else x * self.spec.head_scale

    def _embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the first block's input from token embeddings."""
        if self.spec.rounds_embed_scale:
            x = x * torch.tensor(self.spec.embed_scale, dtype=x.dtype)
        elif self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        x = self.project_in(x) if self.spec.embed_size else x
        if self.spec.rope is None and self.spec.learned_positions:
            x = x + self.embed_positions(position_ids + self.spec.position_offset)
        x = x if self.embed_norm is None else self.embed_norm(x)
        dropout = self.spec.embed_dropout
        return F.dropout(x, dropout, self.training) if dropout else x

    def embed_tokens(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the first block's input (B, T, D) from token ids (B, T) and positions (B, T)."""
        return self._embed(self.embed_inputs(input_ids, None), position_ids)

    def project_last(self, x: Tensor) -> Tensor:
        """Compute the input of the language-model head from the last block's output."""
        return self._scale_for_head(self._finish(x))

    def _finish(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return self.project_out(x) if self.spec.embed_size else x

    def row_positions(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return positions derived from the token ids; None if positions are simply counted."""
        return None

    def _count_positions(self, inputs: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
        is_row = attention_mask is not None and attention_mask.dim() == 2
        if is_row and self.spec.positions_from_mask:
            assert attention_mask is not None
            shown = attention_mask.long()
            return (shown.cumsum(1) * shown - 1)[:, past:]
        end = past + inputs.shape[1]
        return torch.arange(past, end, device=inputs.device)[None]

    def positions_behind_prefix(self, position_ids: Tensor) -> Tensor:
        """Shift positions by the length of a trained prefix whose `shift_positions` is set."""
        length = self._prefix_length()
        return position_ids + length if length else position_ids

    def _prefix_length(self) -> int:
        attentions: Any = (layer.attn for layer in self.layers.values())
        prefix: Any = next((attn.prefix for attn in attentions if attn is not None), None)
        if not getattr(prefix, "shift_positions", False) or weight_of(prefix) == 0:
            return 0
        return int(prefix.length)

    def _windows(self) -> set[int | None]:
        """Return the window sizes of this pipeline stage's layers."""
        attentions: Any = (layer.attn for layer in self.layers.values())
        return {attn.window for attn in attentions if attn is not None}

    def _check_length(self, length: int) -> None:
        if self.position_limit is not None and length > self.position_limit:
            raise ShapeError(
                f"the input has {length} tokens (allowed: at most max_seq_len="
                f"{self.position_limit}). Truncate it, or use a model with a larger max_seq_len."
            )
