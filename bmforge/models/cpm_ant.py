"""CPM-Ant and CPM-Ant+: a text in segments after a trained prompt that says what the task is.

Tokens marked as context are seen by all and see each other; the others are written one by one.
Distances count within a kind of segment, and pairs of kinds have a bias of their own.

Source: OpenBMB/CPM-Live, branches cpm-ant and master; transformers' ``CpmAntForCausalLM``, which
holds the scales in the weights: `fold_scales` and `unfold_scales` go there and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from bmforge.device import reads_are_free
from bmforge.errors import ConfigError, ShapeError
from bmforge.logging import get_logger
from bmforge.models.cpm_ant_config import TEXT_SEGMENT, CPMAntConfig
from bmforge.models.cpm_live import CPMLive
from bmforge.models.output import ModelOutput
from bmforge.models.stack import check_ids, given_inputs
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.segment import find_distances, see_context, segment_rows

__all__ = ["CPMAnt", "CPMAntConfig", "fold_scales", "unfold_scales"]


class CPMAnt(CPMLive):
    """CPM-Ant with its language-model head."""

    config_class = CPMAntConfig
    family_traits = Traits("blanks", "hidden tokens", "relative")
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
        """As `Model.from_pretrained`; a head that transformers tied to the embedding is copied."""
        model = super().from_pretrained(name, **options)
        if model.config.folded and model.config.tie_word_embeddings:
            if model.config.head == "language_model":
                model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())
            model.config = model.config.replace(tie_word_embeddings=False)
        return model

    @classmethod
    def settle_config(cls, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """CPM-Ant+ is told by its weights: the prompts lie behind the tokens.

        Nothing tells whether the residual was divided, as it is in branch master of CPM-Live only:
        where a config.json of CPM-Live does not say so, it is not, and that is said.
        """
        if not config.folded and "sum_scale" not in config.raw:
            get_logger().warning(
                "config.json has no sum_scale: taken is %s, as CPM-Ant and CPM-Ant+ were published "
                "(branches cpm-ant, cpm-ant-plus). A model that was trained with branch master of "
                'CPM-Live divides by 1.05 after every part: add "sum_scale": %r to its config.json',
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

        With `segment`, the inputs are those of CPM-Live, the prompt's ids in front. Without, they
        are a text that is all context, as in transformers: the prompt of `task_id` goes before it
        and is left out of what is returned. With a cache, all but `input_ids`, `labels` and what is
        returned cover the past as well.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens, 0 for padding, on any side; when not given, `length` tells
                or, of a text alone, `pad_token_id`.
            position_ids: without effect, like
            position: distances are counted.
            labels: the token to predict at each position (not shifted in here), -100 for none;
                returns the loss instead of logits.
            num_items_in_batch: what the summed loss is divided by; None gives the mean.
            cache: keys and values of earlier tokens.
            output_hidden_states: return the embedding's and every layer's output.
            logits_to_keep: return logits of only the last so many positions.
            length: number of tokens in each row, padding behind them.
            context: which tokens are given; the others are written one by one.
            segment: kind of segment of every token.
            span: tokens see only those of their own span; None is one span.
            inputs_embeds: instead of `input_ids`, what the embedding would have returned, not
                scaled; with `segment` the prompt's rows in front.
            logits_at: return logits of only these positions of every row of `input_ids`.

        Shape:
            input_ids, labels: (B, T); length: (B,); inputs_embeds: (B, T, D); logits_at: (B, M);
            all others (B, past + T)

        Raises:
            ShapeError: ids outside the vocabulary, or inputs that do not belong together.
        """
        past = cache.length if cache is not None else 0
        given, own = given_inputs(input_ids, inputs_embeds), 0
        if segment is None:
            if context is not None or span is not None or length is not None:
                raise ShapeError("context, span and length need segment. Give all of them or none.")
            own = 0 if past else self.config.prompt_length
            x, mask, bias = self._read_text(given, attention_mask, cache, past)
        elif context is None:
            raise ShapeError("segment needs context: which tokens are given. Give both or none.")
        else:
            _check_width(given, past, segment, context, span, attention_mask)
            real = None if attention_mask is None else attention_mask.bool()
            if length is not None:
                places = torch.arange(segment.shape[1], device=segment.device)
                real = places < length[:, None]
            x, mask, bias = self._read_segments(given, segment, context, span, real, past)
        x, kept = self._run(x, mask, bias, cache, output_hidden_states, own)
        return self._answer(
            x, kept, labels, num_items_in_batch, logits_to_keep, logits_at=logits_at
        )

    def _read_text(
        self,
        given: Tensor,
        attention_mask: Tensor | None,
        cache: KeyValueCache | None,
        past: int,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Embed a text with the prompt before it; return its mask and bias too.

        All rows have one bias: where it would differ is padding, which nobody sees.
        """
        rows, length = given.shape[:2]
        real = self._find_tokens(given, attention_mask, past)
        own = self.config.prompt_length
        width = own + past + length
        if not past and cache is not None:
            cache.extra_length = own
        if self.is_begun:
            (x,) = self.arrived
        else:
            x = self._embed_text(given, real, past) * self.spec.embed_scale
        kinds = TEXT_SEGMENT * (torch.arange(width, device=x.device) >= own)[None].long()
        mask = None
        if real is not None:
            mask = torch.cat((real.new_ones(rows, own), real), 1)[:, None, None]
        queries = x.shape[1]
        return x, mask, self._find_bias(kinds, queries, width - queries)

    def _embed_text(self, given: Tensor, real: Tensor | None, past: int) -> Tensor:
        """Embed a text, behind the prompt where it begins."""
        rows, length = given.shape[:2]
        here = torch.full((1, length), TEXT_SEGMENT, device=given.device)
        if real is not None:
            here = torch.where(real[:, past:], TEXT_SEGMENT, 0)
        x = self._embed_given(given) + self.embed_segments(here)
        if past:
            return x
        prompt = self._prompt_ids(given.device)
        first = self.embed_segments(prompt.new_zeros(1))
        prompt = self._embed_prompt(prompt)[None] + first
        return torch.cat((prompt.expand(rows, -1, -1), x), 1)

    def _read_segments(
        self,
        given: Tensor,
        segment: Tensor,
        context: Tensor,
        span: Tensor | None,
        real: Tensor | None,
        past: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed CPM-Live's inputs; return their mask and bias too."""
        if self.is_begun:
            (x,) = self.arrived
        else:
            x = self._embed_segments(given, segment[:, past:], past) * self.spec.embed_scale
        together = None
        if span is not None:
            together = span[:, None, :] == span[:, past:, None]
        distance = find_distances(x.shape[1], x.device, past)
        mask = see_context(context.bool(), distance, together, real)
        return x, mask, self._find_bias(segment, x.shape[1], past)

    def _embed_given(self, given: Tensor) -> Tensor:
        """Embed ids that are no prompt's; embeddings are so already."""
        return self.embed_inputs(given) if given.dim() == 2 else self.embed_inputs(None, given)

    def _embed_segments(self, given: Tensor, segment: Tensor, past: int) -> Tensor:
        """Embed tokens of segments, the prompt's in front."""
        own = 0 if past or self.config.prompts_in_vocabulary else self.config.prompt_length
        own = own if given.dim() == 2 else 0
        x = self._embed_given(given[:, own:])
        if own:
            check_ids(given[:, :own], self.embed_prompt.num_embeddings)
            x = torch.cat((self._embed_prompt(given[:, :own]), x), 1)
        return x + self.embed_segments(segment)

    def _find_tokens(
        self, given: Tensor, attention_mask: Tensor | None, past: int
    ) -> Tensor | None:
        """Return which tokens of a text are no padding, (B, past + T); None where all are."""
        if attention_mask is not None:
            _check_width(given, past, attention_mask)
            return attention_mask.bool()
        if given.dim() == 3:
            return None
        real = given != self.config.pad_token_id
        # What a model writes after a text is no padding, whatever its id.
        return None if past or (reads_are_free(real) and bool(real.all())) else real

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
        """Map to CPM-Live's names, or transformers', which has the prompts behind the tokens."""
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
        rules = [*(rule for rule in rules if rule.ours != "embed.weight"), *split]
        return [
            WeightRule(rule.ours, self.hf_prefix + rule.theirs, part=rule.part) for rule in rules
        ]


def _check_width(given: Tensor, past: int, *described: Tensor | None) -> None:
    """Refuse descriptions that do not cover the past and the new tokens."""
    wanted = (given.shape[0], past + given.shape[1])
    for tensor in described:
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ShapeError(
                f"an input that describes tokens has shape {tuple(tensor.shape)}; with "
                f"{given.shape[1]} new and {past} cached tokens it must be {wanted}."
            )


def fold_scales(model: CPMAnt) -> CPMAnt:
    """Return a copy whose weights hold the scales, as transformers has them: save it for there.

    Multiplying by a power of two is exact, so where sqrt(width) is one (4096) nothing is lost; the
    MLP's last projection (width 10240) and other widths are rounded once, in the weights' dtype.

    Raises:
        ConfigError: a model that transformers cannot hold: CPM-Ant+, a compressed one, or one whose
            residual is divided.
    """
    return _rescale(model, folded=True)


def unfold_scales(model: CPMAnt) -> CPMAnt:
    """Return a copy with CPM-Live's weights, the scales beside them; the inverse of `fold_scales`.

    Raises:
        ConfigError: the head is not the embedding, as it is in CPM-Live.
    """
    return _rescale(model, folded=False)


def _rescale(model: CPMAnt, folded: bool) -> CPMAnt:
    config = model.config
    weights = dict(model.named_parameters())
    head = weights.pop("lm_head.weight", None)
    if not folded and head is not None and not torch.equal(head, weights["embed.weight"]):
        raise ConfigError(
            "the head differs from the embedding (it was trained apart), and CPM-Live's form has "
            "one for both. Keep the model in transformers' form."
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
