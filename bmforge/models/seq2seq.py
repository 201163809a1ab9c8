"""Encoder-decoder, the base class of T5 and its relatives."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.device import reads_without_sync
from bmforge.errors import ShapeError
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig
from bmforge.models.encoder import DeepClassifier
from bmforge.models.heads import check_logits_at, finish_classes, finish_spans, pick_states
from bmforge.models.output import ModelOutput
from bmforge.models.rules import LayoutRules
from bmforge.models.seq2seq_stack import Seq2SeqSpec, Seq2SeqStack
from bmforge.models.sizes import sizes_of
from bmforge.models.stack import check_ids, find_block, given_inputs, span_of, width_into
from bmforge.models.traits import Traits
from bmforge.nn import LMHead, build_mask
from bmforge.nn.attention import KeyValueCache
from bmforge.records import Span

# (token ids, embeddings) of a text, one of which is None; (None, None) without a text.
Pair = tuple[Tensor | None, Tensor | None]

__all__ = ["Seq2Seq", "shift_right"]


class Seq2Seq(Model):
    """Encoder-decoder: shared embedding, encoder, decoder and a head.

    Args:
        config: config of the family, with `decoder_start_token_id`, `pad_token_id`, `eos_token_id`.
        spec: hyperparameters derived from the config.

    Attributes:
        encoder_heads: names of heads that need only the encoder; with them, no decoder is built.
        biases_prefix: True if prefix tokens have positions, and therefore relative position biases.
    """

    family_traits = Traits("encoder-decoder", "spans", "relative")
    encoder_heads: ClassVar[tuple[str, ...]] = ("token_classification", "encoder")
    biases_prefix: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, spec: Seq2SeqSpec) -> None:
        super().__init__(config)
        self.spec = spec
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        if spec.num_roles:
            self.embed_segments = nn.Embedding(spec.num_roles, config.hidden_size)
        self.encoder = Seq2SeqStack(
            spec.encoder_block, spec.num_encoder_layers, spec, spec.encoder_blocks
        )
        self.decoder = None
        if config.head not in self.encoder_heads:
            self.decoder = Seq2SeqStack(
                spec.decoder_block, spec.num_decoder_layers, spec, spec.decoder_blocks
            )
        self._build_head()

    def _build_head(self) -> None:
        config, size = self.config, self.config.hidden_size
        if config.head == "sequence_to_sequence":
            self.lm_head = LMHead(size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.embed.weight
        elif config.head == "sequence_classification":
            self.classifier: nn.Module = DeepClassifier(
                size, config.num_labels, self.spec.classifier_dropout
            )
        elif config.head in ("token_classification", "question_answering"):
            width = 2 if config.head == "question_answering" else config.num_labels
            self.classifier = nn.Linear(size, width)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: ModelOutput | None = None,
        cache: KeyValueCache | None = None,
        num_items_in_batch: float | Tensor | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        role_ids: Tensor | None = None,
        decoder_role_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> ModelOutput:
        """Encode the source and decode the target, or apply another head.

        Args:
            input_ids: token ids of the source; not needed with `encoder_outputs`.
            attention_mask: 1 for tokens of the source, 0 for padding.
            decoder_input_ids: token ids of the target; by default the start token and the labels
                (for classification and question answering: the source), without the last id.
            decoder_attention_mask: 1 for tokens of the target, 0 for padding, including cached
                tokens.
            labels: for sequence-to-sequence, target ids (-100 is ignored); returns the loss
                instead of logits. For a classifier, see `classification_loss`.
            encoder_outputs: result of `encode` for the source.
            cache: KV cache of the source and of earlier target tokens.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            output_hidden_states: return the outputs of the embedding and of every layer.
            logits_to_keep: number of last positions whose logits are returned; None for all.
            start_positions: first token of the answers (question answering).
            end_positions: last token of the answers.
            role_ids: speaker index of each source token, for models with roles (EVA).
            decoder_role_ids: speaker index of each target token.
            inputs_embeds: token embeddings in place of `input_ids`.
            decoder_inputs_embeds: token embeddings in place of `decoder_input_ids`.
            logits_at: positions, per target, whose logits are returned; None for all.

        Shape:
            input_ids, attention_mask, role_ids: (B, S);
            decoder_input_ids, decoder_role_ids: (B, T);
            decoder_attention_mask: (B, past + T); labels: (B, T) or (B,);
            start_positions, end_positions: (B,); inputs_embeds: (B, S, D);
            decoder_inputs_embeds: (B, T, D); logits_at: (B, M)

        Raises:
            ShapeError: source or target are missing or passed twice, or ids are outside of the
                vocabulary.
        """
        head, source = self.config.head, encoder_outputs
        check_logits_at(head, labels, logits_at)
        if source is None and input_ids is None and inputs_embeds is None:
            raise ShapeError("the encoder needs input_ids, inputs_embeds or encoder_outputs.")
        target, target_embeds = decoder_input_ids, decoder_inputs_embeds
        if self.decoder is None:
            target = target_embeds = None
        elif target is None and target_embeds is None:
            target = self._shift(input_ids, labels)
        encoder_span, decoder_span = span_of(self.encoder.layers), self._decoder_span()
        if encoder_span.first:
            x, y = (*self.stage_inputs, None)[:2]
        else:
            source_pair = (input_ids, inputs_embeds) if source is None else (None, None)
            x, y = self._embed(source_pair, (target, target_embeds))
            x, y = self._add_roles(x, role_ids), self._add_roles(y, decoder_role_ids)
        if source is None and encoder_span.first < encoder_span.last:
            x, states = self.encoder(x, attention_mask, keep_states=output_hidden_states)
            source = ModelOutput(last_hidden_state=x, hidden_states=states)
        source = source or ModelOutput(last_hidden_state=x)
        if encoder_span.last < encoder_span.total or (decoder_span.total and not decoder_span.last):
            return ModelOutput(stage_outputs=(x,) if y is None else (x, y))
        if head == "encoder":
            return source
        if head == "token_classification":
            return self._classify(source, labels, num_items_in_batch)
        out = self._decode(
            y, decoder_attention_mask, source, attention_mask, cache, output_hidden_states
        )
        assert out.last_hidden_state is not None
        if decoder_span.last < decoder_span.total:
            return ModelOutput(stage_outputs=(x, out.last_hidden_state))
        if head == "sequence_to_sequence":
            return self._predict(out, labels, num_items_in_batch, logits_to_keep, logits_at)
        if head == "question_answering":
            logits = self.classifier(out.last_hidden_state)
            return finish_spans(out, logits, start_positions, end_positions, num_items_in_batch)
        if head == "sequence_classification":
            return self._classify(out, labels, num_items_in_batch, input_ids)
        return out

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        role_ids: Tensor | None = None,
    ) -> ModelOutput:
        """Run the encoder; the result can be passed as `encoder_outputs`.

        Shape:
            input_ids, attention_mask, role_ids: (B, S)
        """
        x = self._add_roles(self.embed_inputs(input_ids), role_ids)
        x, states = self.encoder(x, attention_mask, keep_states=output_hidden_states)
        return ModelOutput(last_hidden_state=x, hidden_states=states)

    def _decoder_span(self) -> Span:
        return Span(0, 0, 0) if self.decoder is None else span_of(self.decoder.layers)

    def _embed(self, source: Pair, target: Pair) -> tuple[Any, Any]:
        """Embed source and target; if both are ids, one lookup gives the table one gradient."""
        names = ("inputs_embeds", "decoder_inputs_embeds")
        texts: list[Any] = [
            None if ids is None and embeds is None else given_inputs(ids, embeds, name)
            for (ids, embeds), name in zip((source, target), names, strict=True)
        ]
        if any(text is None or text.dim() == 3 for text in texts):
            x, y = (
                None if text is None else self.embed_inputs(*pair, name)
                for text, pair, name in zip(texts, (source, target), names, strict=True)
            )
            return x, y
        joined = self.embed_inputs(torch.cat([text.flatten() for text in texts]))
        parts = joined.split([text.numel() for text in texts])
        x, y = (part.view(*t.shape, -1) for part, t in zip(parts, texts, strict=True))
        return x, y

    def _add_roles(self, x: Tensor | None, roles: Tensor | None) -> Any:
        """Add the embeddings of the speakers to token embeddings."""
        if roles is None or x is None:
            return x
        if not self.spec.num_roles:
            raise ShapeError(
                f"{type(self).__name__} does not support role_ids. Leave role_ids out."
            )
        check_ids(roles, self.spec.num_roles, "role_ids", "num_roles")
        return x + self.embed_segments(roles)

    def _decode(
        self,
        x: Tensor,
        mask: Tensor | None,
        source: ModelOutput,
        source_mask: Tensor | None,
        cache: KeyValueCache | None,
        keep_states: bool,
    ) -> ModelOutput:
        """Run the decoder on the target."""
        assert self.decoder is not None
        memory = source.last_hidden_state
        memory_mask = None
        if source_mask is not None:
            shape = source_mask.shape[0], source_mask.shape[1]
            memory_mask = build_mask(shape, x.device, attention_mask=source_mask, causal=False)
        x, states = self.decoder(x, mask, cache, memory, memory_mask, keep_states)
        return ModelOutput(
            last_hidden_state=x,
            hidden_states=states,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=source.hidden_states,
        )

    def _shift(self, input_ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the decoder's default input: labels or source, shifted right."""
        target = labels if self.config.head == "sequence_to_sequence" else input_ids
        if target is None:
            raise ShapeError(
                f"the decoder has no input. With the head {self.config.head!r}, pass "
                "decoder_input_ids, labels or input_ids."
            )
        return shift_right(target, self.config.decoder_start_token_id, self.config.pad_token_id)

    def _predict(
        self,
        out: ModelOutput,
        labels: Tensor | None,
        num_items: float | Tensor | None,
        logits_to_keep: int | None,
        logits_at: Tensor | None,
    ) -> ModelOutput:
        """Apply the sequence-to-sequence head: return the loss if there are labels, else logits."""
        x, scale = out.last_hidden_state, self.spec.head_scale
        assert x is not None
        if labels is None:
            x = pick_states(x, logits_to_keep, logits_at)
        x = x if scale == 1.0 else x * scale
        if labels is None:
            return out._replace(logits=self.lm_head(x))
        return out._replace(loss=self.lm_head(x, labels, num_items))

    def _classify(
        self,
        out: ModelOutput,
        labels: Tensor | None,
        num_items: float | Tensor | None,
        ends_of: Tensor | None = None,
    ) -> ModelOutput:
        """Classify every token or, for sequence classification, each last EOS token.

        `ends_of` contains the token ids in which the EOS tokens are found.
        """
        x = out.last_hidden_state
        assert x is not None
        if self.config.head == "sequence_classification":
            if ends_of is None:
                raise ShapeError(
                    "the sequence classification head needs input_ids to find the end-of-sequence "
                    "token. Pass input_ids."
                )
            last = find_last_end(ends_of, self.config.eos_token_id)
            x = x[torch.arange(x.shape[0], device=x.device), last]
        dropout = self.spec.classifier_dropout
        logits = self.classifier(F.dropout(x, dropout, self.training) if dropout else x)
        return finish_classes(out, logits, labels, self.config.problem_type, num_items)

    def init_std(self, name: str) -> float:
        """Return a parameter's initial std as in T5: `config.init_std` over sqrt(input width).

        Embeddings and head have a standard deviation of `config.init_std`.
        """
        config = self.config
        if name.startswith(("embed", "lm_head")):
            return float(config.init_std)
        width = config.hidden_size
        if name.endswith("q_proj.weight"):
            width *= sizes_of(find_block(self, name).spec).head_dim
        elif name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            width = width_into(self, name)
        return float(config.init_std * width**-0.5)

    def layout_rules(self) -> LayoutRules:
        """Return the sharding plan; its units are the layers of both stacks."""
        parts = ("encoder",) if self.decoder is None else ("encoder", "decoder")
        stacks = tuple(f"{part}.layers" for part in parts)
        units = tuple(f"{stack}.*" for stack in stacks)
        return LayoutRules(units, units, self.tensor_parallel_rules(), stacks)


def shift_right(ids: Tensor, start: int, padding: int) -> Tensor:
    """Shift ids to the right to get the decoder's input: start token first, last id dropped.

    Shape:
        ids: (B, T) -> (B, T), with -100 replaced by `padding`
    """
    moved = F.pad(ids[:, :-1], (1, 0), value=start)
    return moved.masked_fill(moved == IGNORE_INDEX, padding)


def find_last_end(input_ids: Tensor, end: int) -> Tensor:
    """Return (B,): the index of the last EOS token of every sequence.

    Raises:
        ShapeError: a sequence has no end token.
    """
    is_end = input_ids == end
    if reads_without_sync(is_end) and not bool(is_end.any(1).all()):
        rows = (~is_end.any(1)).nonzero()[:, 0].tolist()
        raise ShapeError(
            f"sequences {rows} have no end-of-sequence token (eos_token_id={end}), whose hidden "
            "state is classified. Append the token to every sequence."
        )
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (positions * is_end).argmax(-1)
