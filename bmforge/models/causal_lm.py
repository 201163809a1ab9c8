"""The decoder-only language model that GPT2, Llama and their relatives assemble."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ShapeError
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig
from bmforge.nn import (
    Block,
    BlockSpec,
    RopeSpec,
    build_mask,
    build_norm,
    causal_lm_loss,
    rope_table,
)
from bmforge.nn.attention import KeyValueCache

__all__ = ["CausalLM", "CausalLMOutput"]


class CausalLMOutput(NamedTuple):
    """What a language model returns.

    Shape:
        loss: scalar, with labels
        logits: (B, T, V), without labels
        last_hidden_state: (B, T, D), after the last norm
        hidden_states: num_layers + 1 tensors (B, T, D), when asked for
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class CausalLM(Model):
    """Embedding, blocks, norm, head.

    Args:
        config: the family's config.
        spec: data of the blocks.
        rope: rotary positions; None learns absolute ones (`embed_positions`).
        embed_dropout: dropout after the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: BlockSpec,
        rope: RopeSpec | None,
        embed_dropout: float = 0.0,
    ) -> None:
        super().__init__(config)
        self.rope = rope
        self.embed_dropout = embed_dropout
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        if rope is None:
            self.embed_positions = nn.Embedding(config.max_seq_len, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(spec, i) for i in range(config.num_layers)})
        self.norm = build_norm(spec.norm, config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        cache: KeyValueCache | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | None = None,
    ) -> CausalLMOutput:
        """Predict the next token at every position.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding; with a cache it covers the past as well.
            position_ids: positions; counted from the cache's length when not given.
            document_ids: packed rows: tokens see only their own document.
            labels: token ids to predict, shifted in here; -100 is not counted. Returns the loss.
            num_items_in_batch: what the summed loss is divided by; None gives the mean.
            cache: keys and values of earlier tokens.
            output_hidden_states: return the embedding's and every layer's output.
            logits_to_keep: return logits of only the last so many positions.

        Shape:
            input_ids, labels, document_ids: (B, T); attention_mask: (B, past + T);
            position_ids: (B or 1, T)

        Raises:
            ShapeError: more positions than the model has.
        """
        past = cache.length if cache is not None else 0
        self._check_length(past + input_ids.shape[1])
        if position_ids is None:
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[
                None
            ]
        x = self._embed(input_ids, position_ids)
        mask = build_mask(
            (input_ids.shape[0], input_ids.shape[1]),
            input_ids.device,
            past=past,
            attention_mask=attention_mask,
            document_ids=document_ids,
        )
        table = None if self.rope is None else rope_table(self.rope, position_ids, x.dtype)
        states = [x]
        for layer in self.layers.values():
            x = layer(x, mask, table, cache)
            if output_hidden_states:
                states.append(x)
        x = self.norm(x)
        kept = (*states[:-1], x) if output_hidden_states else None
        if labels is not None:
            loss = causal_lm_loss(x, self.lm_head.weight, labels, None, num_items_in_batch)
            return CausalLMOutput(loss, None, x, kept)
        tail = x if logits_to_keep is None else x[:, -logits_to_keep:]
        return CausalLMOutput(None, self.lm_head(tail), x, kept)

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.rope is None:
            x = x + self.embed_positions(position_ids)
        return F.dropout(x, self.embed_dropout, self.training) if self.embed_dropout else x

    def _check_length(self, length: int) -> None:
        if self.rope is None and length > self.config.max_seq_len:
            raise ShapeError(
                f"{length} tokens were given, but the model has max_seq_len="
                f"{self.config.max_seq_len} positions. Cut the input, or train with more positions."
            )
