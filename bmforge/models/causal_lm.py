"""The decoder-only model that GPT2, Llama and their relatives assemble."""

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
    check_places,
    find_last_token,
    finish_classes,
    finish_spans,
    pick_states,
)
from bmforge.models.output import ModelOutput
from bmforge.models.stack import StackSpec, build_layers, given_inputs, run_layers, span_of
from bmforge.models.traits import Traits
from bmforge.nn import (
    LMHead,
    MoESpec,
    RopeSpec,
    balance_loads,
    build_mask,
    build_norm,
    count_loads,
    rope_table,
)
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.cuts import Pass, pass_on

__all__ = ["CausalLM", "DecoderSpec"]


@dataclass(frozen=True)
class DecoderSpec(StackSpec):
    """Everything in which decoder-only families differ: their blocks and what is around them.

    Args:
        rope: rotary positions; None learns absolute ones (`embed_positions`), unless
        learned_positions: is off: the family has a bias on the scores for them.
        num_positions: rows of `embed_positions`; 0 takes max_seq_len.
        position_offset: row of the first position.
        positions_from_mask: where positions are not given, count the tokens `attention_mask` shows;
            padding is at -1.
        extra_tokens: rows of embedding and head beyond vocab_size.
        embed_size: width of the embedding, projected to D and back; 0 is D itself.
        padding_id: the token whose embedding gets no gradient.
        embed_dropout: dropout after the embedding.
        embed_scale: factor on the embedding.
        final_norm: norm after the last block.
        head_bias: bias of the language-model head.
        head_scale: factor on what goes into the language-model head.
        balance_weight: factor on the experts' load-balancing loss in the loss; None computes none.
    """

    rope: RopeSpec | None = None
    learned_positions: bool = True
    num_positions: int = 0
    position_offset: int = 0
    positions_from_mask: bool = False
    extra_tokens: int = 0
    embed_size: int = 0
    padding_id: int | None = None
    embed_dropout: float = 0.0
    embed_scale: float = 1.0
    final_norm: bool = True
    head_bias: bool = False
    head_scale: float = 1.0
    balance_weight: float | None = None


class CausalLM(Model):
    """Embedding, blocks, norm, and one of the heads.

    Args:
        config: the family's config.
        spec: what the config comes down to.

    Attributes:
        sum_statistics: adds up the experts' loads where several processes share a step, each with
            its tokens; a layout puts its own here. None leaves the balance out of the loss.
    """

    family_traits = Traits("left", "next token", "rotary")

    def __init__(self, config: ModelConfig, spec: DecoderSpec) -> None:
        super().__init__(config)
        self.spec = spec
        self.sum_statistics: Pass | None = pass_on
        size = spec.embed_size or config.hidden_size
        rows = config.vocab_size + spec.extra_tokens
        self.embed = nn.Embedding(rows, size, padding_idx=spec.padding_id)
        if spec.rope is None and spec.learned_positions:
            rows = (spec.num_positions or config.max_seq_len) + spec.position_offset
            self.embed_positions = nn.Embedding(rows, config.hidden_size)
        if size != config.hidden_size:
            self.project_in = nn.Linear(size, config.hidden_size, bias=False)
            self.project_out = nn.Linear(config.hidden_size, size, bias=False)
        self.layers = build_layers(spec.block, config.num_layers, spec.blocks)
        self.norm = build_norm(spec.block.norm, config.hidden_size) if spec.final_norm else None
        self._build_head(size)

    @property
    def balances(self) -> bool:
        """Whether the loss of a step has the balance of all its tokens' experts in it."""
        return self.spec.balance_weight is not None

    def _build_head(self, size: int) -> None:
        config = self.config
        if config.head == "language_model":
            rows = self.embed.num_embeddings
            self.lm_head = LMHead(size, rows, bias=self.spec.head_bias)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.embed.weight
        elif config.head != "none":
            has_bias = "classifier.bias" in config.heads[config.head].names
            width = 2 if config.head == "question_answering" else config.num_labels
            self.classifier = nn.Linear(size, width, bias=has_bias)

    @property
    def position_limit(self) -> int | None:
        """The longest input, where positions are learned; None where rotary ones go on."""
        learned = self.spec.rope is None and self.spec.learned_positions
        return self.config.max_seq_len if learned else None

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
        """Predict the next token at every position, or what the head answers.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding; with a cache it covers the past as well.
                Or written out for every pair of tokens, instead of seeing what comes before.
            position_ids: positions; counted from the cache's length when not given.
            document_ids: packed rows: tokens see only their own document.
            labels: of a language model: token ids to predict, shifted in here, -100 is not counted;
                returns the loss instead of logits. Of a classifier: see `classification_loss`.
            num_items_in_batch: what the summed loss is divided by; None gives the mean.
            cache: keys and values of earlier tokens.
            output_hidden_states: return the embedding's and every layer's output.
            logits_to_keep: return logits of only the last so many positions.
            start_positions: first token of the answers, for question answering.
            end_positions: last token of the answers.
            inputs_embeds: instead of `input_ids`, what the token embedding would have returned.
            logits_at: return logits of only these positions of every row.

        Shape:
            input_ids, document_ids: (B, T); attention_mask: (B, past + T) or (B, 1, T, past + T);
            position_ids: (B or 1, T); labels: (B, T) or (B,); start_positions, end_positions: (B,);
            inputs_embeds: (B, T, width of the embedding); logits_at: (B, M)

        Raises:
            ShapeError: more positions than the model has, ids outside the vocabulary, or not one of
                ids and embeddings.
        """
        given = given_inputs(input_ids, inputs_embeds)
        check_places(self.config.head, labels, logits_at)
        past = cache.length if cache is not None else 0
        self._check_length(past + given.shape[1])
        if position_ids is None:
            position_ids = self._count_positions(given, attention_mask, past)
        span = span_of(self.layers)
        if span.first:
            x, *routed = self.arrived
        else:
            x, routed = self._begin(self.embed_inputs(input_ids, inputs_embeds), position_ids), []
        masks = self._build_masks(given, attention_mask, document_ids, past)
        rope = self.spec.rope
        table = None if rope is None else rope_table(rope, position_ids, x.dtype)
        x, states = run_layers(
            self.layers, x, masks, output_hidden_states, routed, rope=table, cache=cache
        )
        if span.last < span.total:
            return ModelOutput(carry=(x, *routed))
        x = self._finish(x)
        kept = (*states[:-1], x) if output_hidden_states else None
        if self.config.head == "language_model":
            states = pick_states(x, logits_to_keep, logits_at) if labels is None else x
            out = self._predict(x, labels, num_items_in_batch, states, kept)
            return self._balance(out, routed, attention_mask, labels, num_items_in_batch)
        routers = tuple(routed) or None
        out = ModelOutput(last_hidden_state=x, hidden_states=kept, router_logits=routers)
        if self.config.head == "none":
            return out
        logits = self.classifier(x)
        if self.config.head == "question_answering":
            return finish_spans(out, logits, start_positions, end_positions, num_items_in_batch)
        if self.config.head == "sequence_classification":
            rows = torch.arange(x.shape[0], device=x.device)
            logits = logits[rows, self._pick_tokens(given, attention_mask)]
        return finish_classes(out, logits, labels, self.config.problem_type, num_items_in_batch)

    def _build_masks(
        self,
        given: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        past: int,
    ) -> dict[int | None, Tensor | None]:
        """Return the mask of every window that layers have; `given` are ids or embeddings."""
        if attention_mask is not None and attention_mask.dim() == 4:
            return dict.fromkeys(self._windows(), attention_mask.bool())
        return {
            window: build_mask(
                (given.shape[0], given.shape[1]),
                given.device,
                past=past,
                attention_mask=attention_mask,
                document_ids=document_ids,
                window=window,
            )
            for window in self._windows()
        }

    def _pick_tokens(self, given: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the token of every row that its class is read from, (B,)."""
        config = self.config
        padding = getattr(config, "pad_token_id", config.raw.get("pad_token_id"))
        return find_last_token(given, attention_mask, padding)

    def _predict(
        self,
        x: Tensor,
        labels: Tensor | None,
        num_items: float | Tensor | None,
        states: Tensor,
        kept: tuple[Tensor, ...] | None,
    ) -> ModelOutput:
        """The language-model head: the loss with labels, else the logits of `states`."""
        if labels is not None:
            loss = self.lm_head(self._leave(x), labels, num_items, shift=True)
            return ModelOutput(loss, None, x, kept)
        return ModelOutput(None, self.lm_head(self._leave(states)), x, kept)

    def _balance(
        self,
        out: ModelOutput,
        routed: list[Tensor],
        attention_mask: Tensor | None,
        labels: Tensor | None,
        num_items: float | Tensor | None,
    ) -> ModelOutput:
        """Add the router's logits and, where the config asks for it, the experts' balance.

        The balance is that of all tokens whose loads `sum_statistics` adds up. Each part of them
        adds its share, by the probabilities of its own tokens; shares are scaled as the parts of
        the loss itself are, so that they add up alike.
        """
        if not routed:
            return out
        out = out._replace(router_logits=tuple(routed))
        weight = self.spec.balance_weight
        if weight is None or self.sum_statistics is None:
            return out
        counted = self._count_tokens(out, attention_mask, labels)
        share, whole, labelled, parts = self._find_balance(routed, counted, labels)
        aux_loss = whole + parts * (share - share.detach())  # the mean gradient of the parts
        if out.loss is None or labels is None:
            return out._replace(aux_loss=aux_loss)
        mine = aux_loss if num_items is None else share * (labelled / num_items)
        return out._replace(loss=out.loss + weight * mine, aux_loss=aux_loss)

    def _count_tokens(
        self, out: ModelOutput, attention_mask: Tensor | None, labels: Tensor | None
    ) -> Tensor | None:
        """Return 1 for tokens that count, 0 for padding: masked, or a row without any label."""
        rows = None if labels is None else (labels != IGNORE_INDEX).any(1, keepdim=True)
        if attention_mask is None or out.last_hidden_state is None:
            return None if rows is None else rows.expand_as(labels)  # type: ignore[arg-type]
        mask = attention_mask[:, -out.last_hidden_state.shape[1] :]
        return mask if rows is None else mask * rows

    def _find_balance(
        self, routed: list[Tensor], counted: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the balance of all layers with experts; of several kinds of them, the mean.

        Returns:
            these tokens' share of it, all of it, the labels of all parts, and how many parts.
        """
        spec = self.spec
        specs = (spec.blocks.get(i, spec.block).mlp for i in range(span_of(self.layers).total))
        kinds = [(s.num_experts, s.experts_per_token) for s in specs if isinstance(s, MoESpec)]
        found = {}
        for kind in dict.fromkeys(kinds):
            logits = [part for part, its in zip(routed, kinds, strict=True) if its == kind]
            found[kind] = count_loads(logits, kind[1], counted)
        one = found[kinds[0]][2].new_ones(1)
        labelled = one * (0 if labels is None else (labels[:, 1:] != IGNORE_INDEX).sum())
        here = [tensor.detach() for loads in found.values() for tensor in loads]
        assert self.sum_statistics is not None
        everywhere = self.sum_statistics(torch.cat((*here, labelled, one)))
        lengths = [tensor.shape[0] for tensor in here]
        *totals, labelled, parts = everywhere.split([*lengths, 1, 1])
        share, whole = one.new_zeros(()), one.new_zeros(())
        for number, (kind, (_, sums, _)) in enumerate(found.items()):
            loads, all_sums, tokens = totals[3 * number : 3 * number + 3]
            weight = kinds.count(kind) / len(kinds)
            share = share + weight * balance_loads(loads, sums, tokens)
            whole = whole + weight * balance_loads(loads, all_sums, tokens)
        return share, whole, labelled.squeeze(), parts.squeeze()

    def _leave(self, x: Tensor) -> Tensor:
        """From the last hidden state to what the language-model head reads."""
        return x if self.spec.head_scale == 1.0 else x * self.spec.head_scale

    def _begin(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """From the tokens' embeddings to what goes into the first block."""
        x = x if self.spec.embed_scale == 1.0 else x * self.spec.embed_scale
        x = self.project_in(x) if self.spec.embed_size else x
        if self.spec.rope is None:
            x = x + self.embed_positions(position_ids + self.spec.position_offset)
        dropout = self.spec.embed_dropout
        return F.dropout(x, dropout, self.training) if dropout else x

    def enter(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return what goes into the first block.

        Shape:
            input_ids, position_ids: (B, T); returns (B, T, D)
        """
        return self._begin(self.embed_inputs(input_ids, None), position_ids)

    def leave(self, x: Tensor) -> Tensor:
        """From what comes out of the last block to what the language-model head reads."""
        return self._leave(self._finish(x))

    def _finish(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return self.project_out(x) if self.spec.embed_size else x

    def row_positions(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return the positions of whole rows where the ids decide them; None where tokens count."""
        return None

    def _count_positions(self, given: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
        is_row = attention_mask is not None and attention_mask.dim() == 2
        if is_row and self.spec.positions_from_mask:
            assert attention_mask is not None
            shown = attention_mask.long()
            return (shown.cumsum(1) * shown - 1)[:, past:]
        end = past + given.shape[1]
        return torch.arange(past, end, device=given.device)[None]

    def _windows(self) -> set[int | None]:
        """The windows of the layers that are here."""
        found: Any = (layer.attn for layer in self.layers.values())
        return {attn.window for attn in found if attn is not None}

    def _check_length(self, length: int) -> None:
        if self.position_limit is not None and length > self.position_limit:
            raise ShapeError(
                f"{length} tokens were given, but the model has max_seq_len="
                f"{self.position_limit} positions. Cut the input, or train with more positions."
            )
