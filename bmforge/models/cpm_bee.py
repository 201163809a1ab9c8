"""CPM-Bee: the model generates the answers in nested documents.

Every key and text of a document is a segment; the relation of two segments in the tree selects
their attention bias. A token that exists only in one document has a base id and a sub id: the base
id's embedding is rotated by the sub id, in the input and in the head (`segment.rotate_by_sub_id`).

Source: OpenBMB/CPM-Bee; the sizes are those of its checkpoints' config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from bmforge.errors import ShapeError
from bmforge.models.cpm_live import CPMLive, CPMLiveConfig, read_masks
from bmforge.models.heads import Head
from bmforge.models.output import ModelOutput
from bmforge.models.stack import given_inputs
from bmforge.models.traits import Traits
from bmforge.nn import build_mask
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.segment import (
    context_mask,
    find_distances,
    find_relations,
    relation_rows,
    rotate_by_sub_id,
)
from bmforge.tokenizers.cpm_bee.document import decode_document, encode_document

__all__ = ["CPMBee", "CPMBeeConfig", "decode_document", "encode_document", "to_arguments"]

_MASKS = read_masks(".a.axaxx..xaax.x.fax.fxx.x.xx.x.x.xaxxx.x.xx.x..")


@dataclass(kw_only=True)
class CPMBeeConfig(CPMLiveConfig):
    """Config of CPM-Bee; other fields are those of `CPMLiveConfig`.

    Args:
        num_relations: number of rows of the bias table for segment relations.
    """

    family: ClassVar[str] = "cpm_bee"
    model_types: ClassVar[tuple[str, ...]] = ("cpm_bee", "cpmbee")
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("CPMBee", aliases=("CpmBeeForCausalLM",)),
        "none": Head("CPMBeeModel", aliases=("CpmBeeModel",)),
    }
    hf_names: ClassVar[dict[str, str]] = {
        **CPMLiveConfig.hf_names,
        "num_relations": "position_bias_num_segment_buckets",
    }
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "distance_scale": (16,),
        "tie_word_embeddings": (True,),
    }
    hf_defaults: ClassVar[dict[str, Any]] = {**CPMLiveConfig.hf_defaults, "num_relations": 32}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpm-bee-10b": {},
        "cpm-bee-5b": {"mask_modules": _MASKS},
        "cpm-bee-2b": {"mask_modules": _MASKS, "intermediate_size": 5120, "head_dim": 64},
        "cpm-bee-1b": {"mask_modules": _MASKS, "intermediate_size": 1024, "head_dim": 40},
        "cpm-bee-3b": {
            "vocab_size": 86580,
            "hidden_size": 2560,
            "intermediate_size": 3072,
            "num_layers": 32,
            "head_dim": 80,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        name: f"openbmb/{name}" for name in presets if name != "cpm-bee-3b"
    }

    vocab_size: int = 86583
    num_buckets: int = 256
    num_relations: int = 256
    sum_scale: float = 1 / 1.05

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for CPM-Bee; files without model_type are recognized by relation buckets."""
        live = "model_type" not in raw and "position_bias_num_segment_buckets" in raw
        return live or raw.get("model_type") in cls.model_types

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.hidden_size % 2:
            yield (
                f"hidden_size={self.hidden_size} must be even, because sub ids rotate pairs of dims"
            )
        if not self.tie_word_embeddings:
            yield "tie_word_embeddings must be True, because the head uses the token embedding"


class CPMBee(CPMLive):
    """CPM-Bee with a language-model head."""

    config_class = CPMBeeConfig
    family_traits = Traits("causal", "documents", "relative", tokenizer="CPMBeeTokenizer")
    fixed_width = "its hidden size must be even, because sub ids rotate pairs of features"
    hf_prefix = "cpmbee."

    def __init__(self, config: CPMBeeConfig) -> None:
        super().__init__(config, config.num_buckets + config.num_relations)

    def forward(  # type: ignore[override]
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
        *,
        input_sub: Tensor | None = None,
        length: Tensor | None = None,
        context: Tensor | None = None,
        sample_ids: Tensor | None = None,
        num_segments: Tensor | None = None,
        segment: Tensor | None = None,
        segment_rel_offset: Tensor | None = None,
        segment_rel: Tensor | None = None,
        span: Tensor | None = None,
        position: Tensor | None = None,
        ext_table_ids: Tensor | None = None,
        ext_table_sub: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> ModelOutput:
        """Predict the next token at every position.

        With `segment`, the inputs are those of CPM-Bee (`tokenizers.cpm_bee_batch`,
        `to_arguments`). Without it, the input is plain text in causal order. With a cache,
        per-token inputs also cover the cached tokens.

        Args:
            input_ids: token ids below the vocabulary size.
            attention_mask: 1 for tokens, 0 for padding; plain text only.
            position_ids: ignored; distances are computed from `position`.
            document_ids: document of each token in packed sequences; plain text only.
            labels: target ids (not shifted by the model; -100 is ignored); ids of at
                least the vocabulary size select rows of `ext_table_ids`. Returns the loss instead
                of logits.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            cache: KV cache of earlier tokens.
            output_hidden_states: return the outputs of the embedding and of every layer.
            logits_to_keep: number of last positions whose logits are returned; None for all.
            input_sub: sub ids of `input_ids`.
            length: number of tokens of each sequence; if None, tokens with num_segments 0 are
                padding.
            context: True for context tokens; the others are generated one by one.
            sample_ids: 0 for the document, which attends to all samples; 1, 2, ... for examples.
            num_segments: number of segments in a token's sample.
            segment: segment index of a token in its sample.
            segment_rel_offset: start of the sample's relation table in `segment_rel`.
            segment_rel: relation tables, see `nn.segment.find_relations`.
            span: span index of every token; tokens attend within their span; None means one span.
            position: positions from which distances are computed; None means 0, 1, 2, ...
            ext_table_ids: base ids of E additional tokens, such as candidate answers; their logits
                follow those of the vocabulary.
            ext_table_sub: sub ids of the additional tokens.
            inputs_embeds: token embeddings in place of `input_ids`, neither scaled nor rotated.
            logits_at: positions, per sequence, whose logits are returned; None for all.

        Shape:
            input_ids, input_sub, labels: (B, T); length: (B,); segment_rel: (B, R);
            ext_table_ids, ext_table_sub: (E,); all others (B, past + T);
            inputs_embeds: (B, T, D); logits_at: (B, M); returns logits (B, T, V + E)

        Raises:
            ShapeError: ids are outside of the vocabulary, or inputs are inconsistent.
        """
        past = cache.length if cache is not None else 0
        inputs = given_inputs(input_ids, inputs_embeds)
        if self.is_begun:
            (x,) = self.stage_inputs
        else:
            x = self._rotate(self.embed_inputs(input_ids, inputs_embeds), input_sub)
        if segment is None:
            mask, bias = self._read_text(inputs, attention_mask, document_ids, past)
        else:
            tokens = _check_tokens(
                (inputs.shape[0], past + inputs.shape[1]),
                segment=segment,
                context=context,
                sample_ids=sample_ids,
                num_segments=num_segments,
                offset=segment_rel_offset,
            )
            if segment_rel is None:
                raise ShapeError(
                    "segment needs segment_rel (the relations between segments). Pass segment_rel "
                    "as well."
                )
            mask, bias = self._read_tokens(tokens, segment_rel, length, span, position, past)
        x, hidden_states = self._run(x, mask, bias, cache, output_hidden_states)
        extension = None
        if ext_table_ids is not None and self.is_done:
            sub = None if ext_table_sub is None else ext_table_sub[None]
            extension = self._rotate(self.embed_inputs(ext_table_ids[None]), sub)[0]
        return self._answer(
            x, hidden_states, labels, num_items_in_batch, logits_to_keep, extension, logits_at
        )

    def _rotate(self, x: Tensor, sub: Tensor | None) -> Tensor:
        """Scale token embeddings, (B, T, D), and rotate them by their sub ids."""
        x = x * self.spec.embed_scale
        return x if sub is None else rotate_by_sub_id(x, sub)

    def _read_text(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        past: int,
    ) -> tuple[Tensor | None, Tensor]:
        """Return the attention mask and the position bias for plain text.

        Without `attention_mask` and `document_ids`, the bias includes the causal mask, and the
        returned mask is None.
        """
        rows, length = inputs.shape[:2]
        distance = find_distances(length, inputs.device, past)
        bias = self._find_bias(torch.zeros_like(distance), distance)
        if attention_mask is None and document_ids is None:
            return None, bias.masked_fill(distance > 0, -torch.inf)
        mask = build_mask(
            (rows, length),
            inputs.device,
            past=past,
            attention_mask=attention_mask,
            document_ids=document_ids,
        )
        return mask, bias

    def _read_tokens(
        self,
        tokens: _Tokens,
        relations: Tensor,
        length: Tensor | None,
        span: Tensor | None,
        position: Tensor | None,
        past: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention mask and the position bias for documents."""
        samples, width = tokens.sample_ids, tokens.segment.shape[1]
        together = samples[:, None, :] == samples[:, past:, None]
        allowed = together | (samples[:, past:, None] == 0)
        if span is not None:
            same = span[:, None, :] == span[:, past:, None]
            together, allowed = together & same, allowed & same
        real = tokens.num_segments != 0
        if length is not None:
            real = torch.arange(width, device=real.device) < length[:, None]
        distance = find_distances(width - past, real.device, past, position)
        mask = context_mask(tokens.context.bool(), distance, allowed, real)
        relation = find_relations(
            tokens.segment, tokens.num_segments, tokens.offset, relations, together
        )
        return mask, self._find_bias(relation, distance)

    def _find_bias(self, relation: Tensor, distance: Tensor) -> Tensor:
        config = self.config
        return self.rel_bias(
            relation_rows(relation, distance, config.num_buckets, config.max_seq_len)
        )

    def tied_copies(self) -> dict[str, str]:
        """Map the head's name to the embedding's; some checkpoints store the tied head too."""
        return {"lm_head.weight": "cpmbee.input_embedding.weight"}


class _Tokens(NamedTuple):
    """Inputs with one value per cached or new token, each (B, past + T)."""

    segment: Tensor
    context: Tensor
    sample_ids: Tensor
    num_segments: Tensor
    offset: Tensor


def _check_tokens(shape: tuple[int, int], **described: Tensor | None) -> _Tokens:
    """Raise `ShapeError` unless all inputs are given, for the cached and the new tokens."""
    for name, tensor in described.items():
        if tensor is None:
            raise ShapeError(
                f"segment needs {name}. Build the batch with `tokenizers.cpm_bee_batch`."
            )
        if tuple(tensor.shape) != shape:
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)} (expected: {shape}, including cached "
                "tokens)."
            )
    return _Tokens(**{name: tensor for name, tensor in described.items() if tensor is not None})


def to_arguments(inputs: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Convert arrays of `tokenizers.cpm_bee_batch` to arguments of `CPMBee.forward`."""
    names = {"input": "input_ids"}
    return {names.get(name, name): torch.from_numpy(array) for name, array in inputs.items()}
