"""GPT2, GPTj, OPT, Llama, GLM, CPM1 and CPM3 as the old programs call them, and newer families."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.compat.model_center.model.base import BaseModel, lengths_to_mask, one_of, refuse_unused
from bmforge.compat.model_center.model.config import Config
from bmforge.compat.model_center.model.outputs import BaseModelOutput
from bmforge.errors import ConfigError
from bmforge.infer.cache import KVCache
from bmforge.models.stack import given_inputs

__all__ = [
    "CPM1",
    "CPM3",
    "GLM",
    "GPT2",
    "OPT",
    "CPM1Config",
    "CPM3Config",
    "GLMConfig",
    "GPT2Config",
    "GPTj",
    "GPTjConfig",
    "Llama",
    "LlamaConfig",
    "MiniCPM",
    "MiniCPMConfig",
    "Mixtral",
    "MixtralConfig",
    "OPTConfig",
    "Qwen",
    "QwenConfig",
]


class DecoderModel(BaseModel):
    """A decoder that reads from left to right."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        use_cache: bool = False,
        past_key_values: KVCache | None = None,
        output_logits: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
        return_logits: bool = False,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Read a text, or its next tokens.

        Args:
            input_ids: token ids.
            length: tokens of each row, padding behind them; or
            attention_mask: 1 for tokens, 0 for padding; both cover the past as well.
            token_type_ids: not used.
            position_ids: counted when not given.
            use_cache: keep keys and values for later tokens.
            past_key_values: what an earlier call returned under this name; it is extended in place.
            output_logits: make the logits, too.
            output_hidden_states: return the hidden states of all layers.
            return_dict: an output with names; else its values as a plain tuple.
            return_logits: return the logits alone, as early versions did.
            inputs_embeds: taken instead of what the embedding makes of `input_ids`.
            others: what the old models took without using it.

        Shape:
            input_ids: (B, T); attention_mask: (B, past + T); length: (B,)
        """
        refuse_unused(others)
        input_ids, inputs_embeds = one_of(input_ids, inputs_embeds)
        given = given_inputs(input_ids, inputs_embeds)
        past = 0 if past_key_values is None else past_key_values.length
        width = past + given.shape[1]
        if attention_mask is None and length is not None:
            attention_mask = lengths_to_mask(length, width)
        cache = self._open_cache(past_key_values, use_cache, width)
        found = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache=cache,
            output_hidden_states=bool(output_hidden_states),
            inputs_embeds=inputs_embeds,
        )
        last, layers = found.last_hidden_state, found.hidden_states
        return self.answer(
            last,
            lambda logits: BaseModelOutput(last, cache, logits, layers),
            output_logits=output_logits,
            return_logits=return_logits,
            return_dict=return_dict,
        )


class GPT2Config(Config):
    """Sizes of a GPT-2."""

    family = "GPT2"


class GPT2(DecoderModel):
    """GPT-2."""

    _CONFIG_TYPE = GPT2Config


class GPTjConfig(Config):
    """Sizes of a GPT-J."""

    family = "GPTJ"


class GPTj(DecoderModel):
    """GPT-J."""

    _CONFIG_TYPE = GPTjConfig


class OPTConfig(Config):
    """Sizes of an OPT."""

    family = "OPT"


class OPT(DecoderModel):
    """OPT."""

    _CONFIG_TYPE = OPTConfig

    def _hidden_width(self) -> int:
        return int(self.model.config.embed_size or self.model.config.hidden_size)


class LlamaConfig(Config):
    """Sizes of a Llama."""

    family = "Llama"


class Llama(DecoderModel):
    """Llama."""

    _CONFIG_TYPE = LlamaConfig


class QwenConfig(Config):
    """Sizes of a Qwen."""

    family = "Qwen"


class Qwen(DecoderModel):
    """Qwen, which ModelCenter did not have."""

    _CONFIG_TYPE = QwenConfig


class MiniCPMConfig(Config):
    """Sizes of a MiniCPM."""

    family = "MiniCPM"


class MiniCPM(DecoderModel):
    """MiniCPM, which ModelCenter did not have."""

    _CONFIG_TYPE = MiniCPMConfig


class MixtralConfig(Config):
    """Sizes of a Mixtral."""

    family = "Mixtral"


class Mixtral(DecoderModel):
    """Mixtral, which ModelCenter did not have."""

    _CONFIG_TYPE = MixtralConfig


class GLMConfig(Config):
    """Sizes of a GLM."""

    family = "GLM"


class GLM(DecoderModel):
    """GLM; without positions they follow from the ids."""

    _CONFIG_TYPE = GLMConfig

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        block_position_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Read a text with blanks.

        Args:
            input_ids: token ids.
            length: tokens of each row, padding behind them.
            attention_mask: 1 for tokens, 0 for padding; or the length of part A of every row (B,).
            position_ids: positions outside of blanks, given together with
            block_position_ids: places in the blanks.
            options: as in `DecoderModel`.

        Shape:
            input_ids, position_ids, block_position_ids: (B, T); length: (B,)
        """
        if position_ids is not None and block_position_ids is not None:
            position_ids = torch.stack((position_ids, block_position_ids), 1)
        return super().forward(input_ids, length, attention_mask, None, position_ids, **options)


class CPM1Config(Config):
    """Sizes of a CPM-1."""

    family = "CPM1"


class CPM1(BaseModel):
    """CPM-1 as it was published, a GPT-2.

    ModelCenter's class of this name was another model, with relative positions and gated MLPs.
    """

    _CONFIG_TYPE = CPM1Config

    def forward(
        self,
        input: Tensor,
        length: Tensor | None = None,
        context: Tensor | None = None,
        span: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of every position, or the scores of its classes.

        Args:
            input: token ids.
            length: tokens of each row, padding behind them.
            context: tokens that all may see; CPM-1 has none, so all must be False.
            span: tokens see only those of their own span; None is one span.

        Shape:
            input, context, span: (B, T); length: (B,); returns (B, T, V) or (B, T, cls_head)

        Raises:
            ConfigError: a context was given.
        """
        if context is not None and bool(context.any()):
            raise ConfigError(
                "context marks tokens that all may see, but CPM-1 reads from left to right: pass "
                "context=None, or use GLM, CPM2 or CPM3."
            )
        mask = None if length is None else lengths_to_mask(length, input.shape[1])
        return self.make_logits(self.model(input, mask, document_ids=span).last_hidden_state)


class CPM3Config(Config):
    """Sizes of a CPM-3, whose architecture is CPM-Ant's."""

    family = "CPMAnt"


class CPM3(BaseModel):
    """CPM-3, the architecture that was published as CPM-Ant."""

    _CONFIG_TYPE = CPM3Config

    def forward(
        self,
        input: Tensor,
        length: Tensor | None = None,
        context: Tensor | None = None,
        position: Tensor | None = None,
        segment: Tensor | None = None,
        span: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of every position, and the hidden states.

        Args:
            input: token ids, the prompt's in front.
            length: tokens of each row, padding behind them.
            context: tokens that all may see; the others are written from left to right.
            position: of every token within its segment.
            segment: kind of segment of every token.
            span: tokens see only those of their own span; None is one span.

        Shape:
            all but length: (B, T); length: (B,); returns (B, T, V) and (B, T, D)
        """
        hidden = self.model(
            input, length=length, context=context, position=position, segment=segment, span=span
        ).last_hidden_state
        return self.make_logits(hidden), hidden
