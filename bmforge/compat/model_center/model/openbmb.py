"""ModelCenter's models CPM1, CPM3 and GLM.

Before version 1.0, forward of CPM1 and CPM3 had other argument names and returned the logits.
ModelCenter's examples still use that form; both are supported. Start at `CPM1.forward`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.compat.model_center.model.base import BaseModel
from bmforge.compat.model_center.model.config import Config, CPM1Config, CPM3Config, GLMConfig
from bmforge.compat.model_center.model.decoders import TextModel
from bmforge.compat.model_center.model.inputs import TextInputs, expand_mask, lengths_to_mask
from bmforge.compat.model_center.model.relative_cpm1 import RelativeCPM1
from bmforge.errors import ConfigError
from bmforge.models import Model
from bmforge.models.formats.model_center import fill_model_center
from bmforge.nn import build_mask

__all__ = ["CPM1", "CPM3", "GLM"]

# Arguments that exist since version 1.0 only.
_NEW = ("output_logits", "output_hidden_states", "return_dict", "use_cache", "past_key_values")


class GLM(TextModel):
    """GLM model, which derives missing positions and the bidirectional prefix from the ids."""

    _CONFIG_TYPE = GLMConfig

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        block_position_ids: Tensor | None = None,
        sep: Tensor | None = None,
        *,
        length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the model on a text with blanks; return the logits.

        Args:
            input_ids: token ids.
            position_ids: positions outside of blanks.
            block_position_ids: positions within blanks.
            sep: length of each sequence's prefix (part A), to which all tokens attend.
            length: number of tokens per sequence, before padding.
            attention_mask: 1 for tokens, 0 for padding; a 1-D tensor is used as `sep`.
            options: options of `TextModel`; if one of them selects outputs, a `ModelOutput`
                is returned instead of the logits.

        Shape:
            input_ids, position_ids, block_position_ids: (B, T); sep, length: (B,)
        """
        if position_ids is not None and position_ids.dim() == 1:  # 1-D position ids are lengths
            position_ids, length = None, position_ids
        if attention_mask is not None and attention_mask.dim() < 2:
            attention_mask, sep = None, attention_mask
        if not any(name in options for name in _NEW):
            options["return_logits"] = True
        if input_ids is not None and options.get("past_key_values") is None:
            position_ids = self._complete(input_ids, position_ids, block_position_ids)
        elif position_ids is not None and block_position_ids is not None:
            position_ids = torch.stack((position_ids, block_position_ids), 1)
        if sep is not None:
            if length is not None and input_ids is not None:
                attention_mask = lengths_to_mask(length, input_ids.shape[1])
            attention_mask = self._prefix_or_mask(input_ids, sep, attention_mask)
        return super().forward(input_ids, length, attention_mask, None, position_ids, **options)

    def _complete(
        self, input_ids: Tensor, positions: Tensor | None, places: Tensor | None
    ) -> Tensor | None:
        """Return position ids and block position ids (`places`), (B, 2, T); None without both."""
        if positions is None and places is None:
            return None
        if positions is None or places is None:
            derived = self.model.row_positions(input_ids, None)  # type: ignore[operator]
            if derived is None:
                raise ConfigError(
                    "position_ids and block_position_ids must be passed together, because the "
                    "config of this model lacks sop_tok_id and mask_tok_id, from which they "
                    "could be computed."
                )
            positions = derived[:, 0] if positions is None else positions
            places = derived[:, 1] if places is None else places
        return torch.stack((positions.long(), places.long()), 1)

    def _prefix_or_mask(
        self, input_ids: Tensor | None, sep: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """Return the prefix lengths `sep`, or the pairwise mask if an attention mask is given."""
        if attention_mask is None or input_ids is None:
            return sep
        shape = (input_ids.shape[0], input_ids.shape[1])
        mask = build_mask(
            shape,
            input_ids.device,
            attention_mask=attention_mask,
            prefix_lengths=sep.reshape(-1).expand(shape[0]),
        )
        assert mask is not None
        return mask


class _OldCall(BaseModel):
    """Base class of models whose forward has an old and a new form; see the module docstring."""

    def _pairwise_mask(
        self,
        text: TextInputs,
        length: Tensor | None,
        attention_mask: Tensor | None,
        context: Tensor | None,
        span: Tensor | None,
    ) -> Tensor:
        """Return the pairwise attention mask, (B, past + T, past + T)."""
        inputs, width = text.inputs, text.width
        if attention_mask is not None and attention_mask.dim() == 3:
            mask = attention_mask.bool()
        else:
            real = inputs.new_ones(inputs.shape[0], width, dtype=torch.bool)
            if attention_mask is not None:
                real = attention_mask.bool()
            elif length is not None:
                real = lengths_to_mask(length, width).bool()
            before = torch.ones(width, width, dtype=torch.bool, device=inputs.device).tril()
            mask = real[:, None] & before
            if context is not None:
                shown = context.bool()
                mask = shown[:, None] | (~shown[:, :, None] & before)
                mask = mask & real[:, None] & real[:, :, None]
        if span is not None:
            mask = mask & (span[:, None] == span[:, :, None])
        return mask


class CPM1(_OldCall):
    """CPM-1: ModelCenter's variant, or the original GPT-2 model; see `CPM1Config`."""

    _CONFIG_TYPE = CPM1Config

    @classmethod
    def _open_old(cls, family: type[Model], directory: Path, config: Config) -> Model:
        model = family.from_config(config.native(), device="meta", dtype=config.dtype)
        return fill_model_center(model, directory)

    def _has_old_names(self) -> bool:
        return isinstance(self.model, RelativeCPM1)

    def forward(
        self,
        input: Tensor | None = None,
        length: Tensor | None = None,
        context: Tensor | None = None,
        span: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the model; with `input` return the logits, with `input_ids` a `ModelOutput`.

        Args:
            input: token ids for the form before version 1.0; also the first positional argument.
            length: number of tokens per sequence, before padding.
            context: True for tokens that all tokens attend to; not supported by the original model.
            span: span id per token; attention stays within a span (default: one span).
            input_ids: token ids for the form since version 1.0.
            attention_mask: 1 for tokens, 0 for padding; or a pairwise mask.
            options: fields of `CallOptions`, and arguments that ModelCenter ignored, such as
                `token_type_ids`.

        Shape:
            input: (B, T); attention_mask: (B, past + T) or (B, past + T, past + T);
            context, span: (B, past + T); length: (B,)

        Raises:
            ConfigError: a context was passed to the original model.
        """
        options.pop("token_type_ids", None)
        if options.pop("position_ids", None) is not None:
            raise ConfigError(
                "position_ids is not supported: CPM1 computes positions itself. Leave "
                "position_ids out."
            )
        if input is not None:
            options["return_logits"] = True
        text = self._take_text(input_ids if input is None else input, options)
        mask = self._pairwise_mask(text, length, attention_mask, self._check_context(context), span)
        outputs = self._run_model(text, expand_mask(mask, text.inputs.shape[1]))
        return self.build_text_output(outputs, text)

    def _check_context(self, context: Tensor | None) -> Tensor | None:
        """Return the context mask; None for the original model, which does not support it."""
        if isinstance(self.model, RelativeCPM1):
            return context
        if context is not None and bool(context.any()):
            raise ConfigError(
                "context marks tokens that every token attends to, but the published "
                "CPM-1 is causal. Pass context=None, or use "
                "CPM1Config(pos_bias_type='relative')."
            )
        return None


class CPM3(_OldCall):
    """CPM-3 model, whose architecture was published as CPM-Ant."""

    _CONFIG_TYPE = CPM3Config

    @classmethod
    def _open_old(cls, family: type[Model], directory: Path, config: Config) -> Model:
        """Load an old checkpoint; CPM-3 is loaded as CPM-Ant, with segment embeddings of zero."""
        model = family.from_config(config.native(), device="meta", dtype=config.dtype)
        segments = model.get_parameter("embed_segments.weight")
        absent = {"token_type_embedding.weight": torch.zeros(segments.shape, dtype=segments.dtype)}
        model = fill_model_center(model, directory, absent)
        model.get_parameter("embed_segments.weight").requires_grad_(False)
        return model

    def forward(
        self,
        input: Tensor | None = None,
        length: Tensor | None = None,
        context: Tensor | None = None,
        position: Tensor | None = None,
        segment: Tensor | None = None,
        span: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the model; with `input` return logits and hidden states, else a `ModelOutput`.

        Args:
            input: token ids, the prompt first, for the form before version 1.0.
            length: number of tokens per sequence, before padding.
            context: True for tokens that all tokens attend to; other attention is causal.
            position: accepted and ignored, as is `position_ids`.
            segment: segment type per token; may also be passed as `token_type_ids`.
            span: span id per token; attention stays within a span (default: one span).
            input_ids: token ids for the form since version 1.0.
            attention_mask: 1 for tokens, 0 for padding.
            token_type_ids, position_ids: see `segment` and `position`.
            options: fields of `CallOptions`, and arguments that ModelCenter ignored.

        Shape:
            input: (B, T); length: (B,); all others: (B, past + T)
        """
        text = self._take_text(input_ids if input is None else input, options)
        segment = token_type_ids if segment is None else segment
        if segment is None:
            shape = text.inputs.shape[0], text.width
            segment = torch.zeros(shape, dtype=torch.long, device=text.inputs.device)
        if context is None:
            context = torch.zeros_like(segment, dtype=torch.bool)
        reads = {"length": length, "context": context, "segment": segment, "span": span}
        outputs = self._run_model(text, attention_mask, **reads)
        if input is None:
            return self.build_text_output(outputs, text)
        return self.make_logits(outputs.last_hidden_state), outputs.last_hidden_state
