"""Creates the decoder that fits a model: decoder-only, encoder-decoder or transformers model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.decoder import Decoder, Seq2SeqDecoder
from bmforge.models.causal_lm import CausalLM
from bmforge.models.config import ModelConfig
from bmforge.nn.prompt import count_ids

if TYPE_CHECKING:
    from bmforge.models.seq2seq import Seq2Seq

__all__ = ["check_inputs", "start_decoder"]


def start_decoder(
    model: CausalLM | Seq2Seq,
    input_ids: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    adapter_names: Sequence[str | None] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> tuple[Decoder, Tensor]:
    """Create a decoder; return it with its first input tokens.

    A decoder-only model continues the prompt; an encoder-decoder encodes the prompt and its decoder
    begins with the start token. `inputs` are model inputs such as `pixel_values`; see `generate`.

    Shape:
        input_ids, mask: (B, S); returns a decoder and (B, T)
    """
    if model.takes_images:
        from bmforge.infer.image_decoder import ImageDecoder

        return ImageDecoder(model, mask, inputs or {}, adapter_names), input_ids  # type: ignore[arg-type]
    if model.keeps_foreign_cache and not model.traits.is_encoder_decoder:
        # Imported here because native models, the usual case, do not need transformers' decoder.
        from bmforge.infer.foreign_decoder import start_foreign

        length = input_ids.shape[1] + max_new_tokens
        return start_foreign(model, mask, length, adapter_names), input_ids
    if not model.traits.is_encoder_decoder:
        length = input_ids.shape[1] + max_new_tokens
        return Decoder(model, mask, length, adapter_names), input_ids
    start = torch.full_like(input_ids[:, :1], _find_start_token(model.config))
    if model.keeps_foreign_cache:
        from bmforge.infer.foreign_decoder import ForeignSeq2SeqDecoder

        return ForeignSeq2SeqDecoder(model, input_ids, mask, adapter_names), start
    return Seq2SeqDecoder(model, input_ids, mask, 1 + max_new_tokens, adapter_names), start


def _find_start_token(config: ModelConfig) -> int:
    """Return the first target token of an encoder-decoder, found by the rules of transformers.

    Raises:
        ConfigError: neither generation_config.json nor config.json contains it.
    """
    published = config.generation_defaults.get("decoder_start_token_id")
    start = getattr(config, "decoder_start_token_id", None) if published is None else published
    start = config.raw.get("bos_token_id") if start is None else start
    if start is None:
        raise ConfigError(
            "config.json has neither decoder_start_token_id nor bos_token_id, but the decoder "
            "needs a first token. Add decoder_start_token_id to config.json."
        )
    return int(start)


def check_inputs(model: Any, inputs: Mapping[str, Tensor] | None) -> None:
    """Raise `ConfigError` if a model cannot use the further inputs of a prompt, such as pixels."""
    if not inputs:
        return
    if not model.takes_images:
        raise ConfigError(
            f"a {type(model).__name__} supports only tokens as inputs, not {', '.join(inputs)}. "
            "Use a vision-language model, or leave the images out."
        )
    if count_ids(model.whole().embed) > model.whole().embed.num_embeddings:
        raise ConfigError(
            "images cannot be used together with a soft prompt, because the prompt moves the "
            "positions of the images. Use another adapter, or leave the images out."
        )
