"""CPM-Ant and CPM-Ant+: text segments after a trained task prompt.

All tokens attend to the context tokens; the other tokens are generated one by one. Attention biases
depend on the distance of two tokens if their segments have the same type, and otherwise on the two
types.

Source: OpenBMB/CPM-Live, branches cpm-ant and master; transformers' ``CpmAntForCausalLM``, whose
weights include the muP scales: `fold_scales` and `unfold_scales` convert between both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from bmforge.device import reads_without_sync
from bmforge.errors import ConfigError, ShapeError
from bmforge.logging import get_logger
from bmforge.models.cpm_ant_config import TEXT_SEGMENT, CPMAntConfig
from bmforge.models.cpm_live import CPMLive
from bmforge.models.output import ModelOutput
from bmforge.models.stack import check_ids, given_inputs
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.segment import context_mask, find_distances, segment_rows

__all__ = ["CPMAnt", "CPMAntConfig", "fold_scales", "unfold_scales"]


class CPMAnt(CPMLive):
    """CPM-Ant with a language-model head."""

    config_class = CPMAntConfig
    family_traits = Traits("prefix", "hidden tokens", "relative")
    hf_prefix = "cpmant."

    def __init__(self, config: CPMAntConfig) -> None:
        prompts = config.prompt_types * config.prompt_length
        extra = prompts if config.prompts_in_vocabulary else 0
        super().__init__(config, config.num_buckets + config.segment_types**2, extra)
        self.embed_segments = nn.Embedding(config.segment_types, config.hidden_size)
        if not extra:
            self.embed_prompt = nn.Embedding(prompts, config.hidden_size)

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Load a checkpoint; if transformers ties the head, it becomes a copy of the embedding."""
        model = super().from_pretrained(name, **options)
        if model.config.folded and model.config.tie_word_embeddings:
            if model.config.head == "language_model":
                model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())
            model.config = model.config.replace(tie_word_embeddings=False)
        return model

    @classmethod
    def complete_from_shapes(cls, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Recognize CPM-Ant+ by its weights, in which the prompts follow the vocabulary.

        The weights do not show whether the residual is scaled, as in branch master of CPM-Live. If
        a CPM-Live config.json has no sum_scale, the residual is not scaled, and a warning is
        logged.
        """
        if not config.folded and "sum_scale" not in config.raw:
            get_logger().warning(
                "config.json has no sum_scale. The value %s of the published CPM-Ant and CPM-Ant+ "
                "(branches cpm-ant, cpm-ant-plus) is used. A model trained with branch master of "
                "CPM-Live divides by 1.05 after every sublayer. For such a model, add "
                '"sum_scale": %r to config.json.',
                config.sum_scale,
                1 / 1.05,
            )
        rows = config.vocab_size + config.prompt_types * config.prompt_length
        joint = shapes.get("input_embedding.weight", (0,))[0] == rows
        if joint and not config.folded and "prompt_embedding.weight" not in shapes:
            return config.replace(prompts_in_vocabulary=True)
        return config

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        cache: KeyValueCache | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | None = None,
        *,
        length: Tensor | None = None,
        context: Tensor | None = None,
        position: Tensor | None = None,
        segment: Tensor | None = None,
        span: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> ModelOutput:
        """Predict the next token at every position.

        With `segment`, the inputs are those of CPM-Live, starting with the prompt's ids. Without
        it, the input is plain text, all of it context, as in transformers: the prompt of `task_id`
        is prepended, and removed from the output. With a cache, all inputs except `input_ids`,
        `labels` and those that select outputs also cover the cached tokens.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding on any side; by default from `length`
                or, for plain text, from `pad_token_id`.
            position_ids: ignored; distances are computed from the order of tokens.
            position: ignored, like `position_ids`.
            labels: target ids (not shifted by the model; -100 is ignored); returns the loss
                instead of logits.
            num_items_in_batch: divisor of the summed loss; if None, the loss is the mean.
            cache: KV cache of earlier tokens.
            output_hidden_states: return the outputs of the embedding and of every layer.
            logits_to_keep: number of last positions whose logits are returned; None for all.
            length: number of tokens of each sequence, without padding.
            context: True for context tokens; the others are generated one by one.
            segment: segment type of every token.
            span: span index of every token; tokens attend within their span; None means one span.
            inputs_embeds: unscaled token embeddings in place of `input_ids`; with `segment` the
                prompt's rows come first.
            logits_at: positions, per sequence, whose logits are returned; None for all.

        Shape:
            input_ids, labels: (B, T); length: (B,); inputs_embeds: (B, T, D); logits_at: (B, M);
            all others (B, past + T)

        Raises:
            ShapeError: ids are outside of the vocabulary, or inputs are inconsistent.
        """
        past = cache.length if cache is not None else 0
        inputs, prompt_length = given_inputs(input_ids, inputs_embeds), 0
        if segment is None:
            if context is not None or span is not None or length is not None:
                raise ShapeError(
                    "context, span and length have no effect without segment. Pass segment as "
                    "well, or leave all of them out."
                )
            prompt_length = 0 if past else self.config.prompt_length
            x, mask, bias = self._read_text(inputs, attention_mask, cache, past)
        elif context is None:
            raise ShapeError(
                "segment needs context (True for input tokens, False for tokens to predict). "
                "Pass both, or leave both out."
            )
        else:
            _check_width(inputs, past, segment, context, span, attention_mask)
            real = None if attention_mask is None else attention_mask.bool()
            if length is not None:
                index = torch.arange(segment.shape[1], device=segment.device)
                real = index < length[:, None]
            x, mask, bias = self._read_segments(inputs, segment, context, span, real, past)
        x, hidden_states = self._run(x, mask, bias, cache, output_hidden_states, prompt_length)
        return self._answer(
            x, hidden_states, labels, num_items_in_batch, logits_to_keep, logits_at=logits_at
        )

    def _read_text(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        cache: KeyValueCache | None,
        past: int,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Embed a text and the prompt before it; return the embeddings, mask and bias.

        All sequences share one bias, because biases would differ only for padding, to which no
        token attends.
        """
        rows, length = inputs.shape[:2]
        real = self._find_tokens(inputs, attention_mask, past)
        prompt_length = self.config.prompt_length
        width = prompt_length + past + length
        if not past and cache is not None:
            cache.extra_length = prompt_length
        if self.is_begun:
            (x,) = self.stage_inputs
        else:
            x = self._embed_text(inputs, real, past) * self.spec.embed_scale
        kinds = TEXT_SEGMENT * (torch.arange(width, device=x.device) >= prompt_length)[None].long()
        mask = None
        if real is not None:
            mask = torch.cat((real.new_ones(rows, prompt_length), real), 1)[:, None, None]
        queries = x.shape[1]
        return x, mask, self._find_bias(kinds, queries, width - queries)

    def _embed_text(self, inputs: Tensor, real: Tensor | None, past: int) -> Tensor:
        """Embed a text; at the beginning of a sequence, prepend the prompt."""
        rows, length = inputs.shape[:2]
        segments = torch.full((1, length), TEXT_SEGMENT, device=inputs.device)
        if real is not None:
            segments = torch.where(real[:, past:], TEXT_SEGMENT, 0)
        x = self._embed_given(inputs) + self.embed_segments(segments)
        if past:
            return x
        prompt = self._prompt_ids(inputs.device)
        first = self.embed_segments(prompt.new_zeros(1))
        prompt = self._embed_prompt(prompt)[None] + first
        return torch.cat((prompt.expand(rows, -1, -1), x), 1)

    def _read_segments(
        self,
        inputs: Tensor,
        segment: Tensor,
        context: Tensor,
        span: Tensor | None,
        real: Tensor | None,
        past: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed inputs in CPM-Live's format; return the embeddings, mask and bias."""
        if self.is_begun:
            (x,) = self.stage_inputs
        else:
            x = self._embed_segments(inputs, segment[:, past:], past) * self.spec.embed_scale
        together = None
        if span is not None:
            together = span[:, None, :] == span[:, past:, None]
        distance = find_distances(x.shape[1], x.device, past)
        mask = context_mask(context.bool(), distance, together, real)
        return x, mask, self._find_bias(segment, x.shape[1], past)

    def _embed_given(self, inputs: Tensor) -> Tensor:
        """Embed token ids without the prompt; given embeddings are returned unchanged."""
        return self.embed_inputs(inputs) if inputs.dim() == 2 else self.embed_inputs(None, inputs)

    def _embed_segments(self, inputs: Tensor, segment: Tensor, past: int) -> Tensor:
        """Embed the tokens of all segments, beginning with the prompt."""
        prompt_length = (
            0 if past or self.config.prompts_in_vocabulary else self.config.prompt_length
        )
        prompt_length = prompt_length if inputs.dim() == 2 else 0
        x = self._embed_given(inputs[:, prompt_length:])
        if prompt_length:
            check_ids(inputs[:, :prompt_length], self.embed_prompt.num_embeddings)
            x = torch.cat((self._embed_prompt(inputs[:, :prompt_length]), x), 1)
        return x + self.embed_segments(segment)

    def _find_tokens(
        self, inputs: Tensor, attention_mask: Tensor | None, past: int
    ) -> Tensor | None:
        """Return a mask that is False for padding, (B, past + T); None without padding."""
        if attention_mask is not None:
            _check_width(inputs, past, attention_mask)
            return attention_mask.bool()
        if inputs.dim() == 3:
            return None
        real = inputs != self.config.pad_token_id
        # Generated tokens are never padding, whatever their id.
        return None if past or (reads_without_sync(real) and bool(real.all())) else real

    def _find_bias(self, segment: Tensor, length: int, past: int) -> Tensor:
        config = self.config
        distance = find_distances(length, segment.device, past)
        rows = segment_rows(
            segment, distance, config.segment_types, config.num_buckets, config.max_seq_len
        )
        return self.rel_bias(rows)

    def _prompt_ids(self, device: torch.device) -> Tensor:
        config = self.config
        first = config.task_id * config.prompt_length
        first += config.vocab_size if config.prompts_in_vocabulary else 0
        return torch.arange(first, first + config.prompt_length, device=device)

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        table = self.embed if self.config.prompts_in_vocabulary else self.embed_prompt
        return table(ids)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to CPM-Live's names or, with folded weights, transformers' names."""
        segments = WeightRule("embed_segments.weight", "segment_embedding.weight")
        rules = [*super().weight_rules(), segments]
        if not self.config.folded:
            return [*rules, WeightRule("embed_prompt.weight", "prompt_embedding.weight")]
        tokens, joint = self.config.vocab_size, "input_embedding.weight"
        total = tokens + self.config.prompt_types * self.config.prompt_length
        split = [
            WeightRule("embed.weight", joint, part=(0, total)),
            WeightRule("embed_prompt.weight", joint, part=(tokens, total)),
        ]
        rules = [*(rule for rule in rules if rule.parameter != "embed.weight"), *split]
        return [
            WeightRule(rule.parameter, self.hf_prefix + rule.source, part=rule.part)
            for rule in rules
        ]


def _check_width(inputs: Tensor, past: int, *described: Tensor | None) -> None:
    """Raise `ShapeError` unless the tensors cover the cached and the new tokens."""
    shape = (inputs.shape[0], past + inputs.shape[1])
    for tensor in described:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ShapeError(
                f"segment, context, span and attention_mask must have the shape {shape} for "
                f"{inputs.shape[1]} new and {past} cached tokens, not {tuple(tensor.shape)}."
            )


def fold_scales(model: CPMAnt) -> CPMAnt:
    """Return a copy whose weights include the scales, as transformers expects them.

    Where sqrt(width) is a power of two (width 4096), the multiplication is exact. Weights of other
    widths, such as the MLP's last projection (10240), are rounded once, to their dtype.

    Raises:
        ConfigError: transformers does not support the model (CPM-Ant+, compressed models, and
            scaled residuals).
    """
    return _rescale(model, folded=True)


def unfold_scales(model: CPMAnt) -> CPMAnt:
    """Return a copy with CPM-Live's weights and separate scales; the inverse of `fold_scales`.

    Raises:
        ConfigError: the head is not tied to the embedding, as CPM-Live requires.
    """
    return _rescale(model, folded=False)


def _rescale(model: CPMAnt, folded: bool) -> CPMAnt:
    config = model.config
    weights = dict(model.named_parameters())
    head = weights.pop("lm_head.weight", None)
    if not folded and head is not None and not torch.equal(head, weights["embed.weight"]):
        raise ConfigError(
            "the LM head differs from the token embedding, but CPM-Live's format stores one "
            "weight for both. Save the model in the format of transformers instead."
        )
    target = config.replace(folded=folded, tie_word_embeddings=not folded, raw={})
    out = CPMAnt.from_config(target, device="meta", dtype=next(iter(weights.values())).dtype)
    out.to_empty(device=next(iter(weights.values())).device)
    if not folded and config.head == "language_model":
        out.lm_head.weight = out.embed.weight
    power = int(folded) - int(config.folded)
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            source = weights["embed.weight" if name == "lm_head.weight" else name]
            factor = out.width_into(name) ** (-0.5 * power)
            parameter.copy_(source.double() * factor)
    return out.train(model.training)
