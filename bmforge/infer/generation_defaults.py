"""Reads a model's generation_config.json as options of `GenerationConfig`."""

from __future__ import annotations

from typing import Any

from bmforge.errors import ConfigError
from bmforge.models.config import ModelConfig

__all__ = ["read_generation_defaults"]

# Fields with the same name and meaning in `GenerationConfig`. End and padding tokens are read by
# `complete_config`.
_SAME = (
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "begin_suppress_tokens",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "num_return_sequences",
)
# Unsupported fields with which transformers would choose other tokens -> values without effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": (1.0,),
    "sequence_bias": ({}, []),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "dola_layers": (),
    "penalty_alpha": (0.0,),
    "diversity_penalty": (0.0,),
    "num_beam_groups": (1,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "token_healing": (False,),
    "max_time": (),
}


def _without_start_token(config: ModelConfig) -> dict[str, Any]:
    """Return the options of generation_config.json, with ``min_length`` converted to new tokens.

    The first token of an encoder-decoder's output is the start token, which ``min_length``
    includes. For other models ``min_length`` includes the prompt and remains unsupported.
    """
    published = dict(config.generation_defaults)
    if config.raw.get("is_encoder_decoder") and isinstance(published.get("min_length"), int):
        shortest = published.pop("min_length") - 1
        published["min_new_tokens"] = max(shortest, published.get("min_new_tokens") or 0)
    return published


def read_generation_defaults(config: ModelConfig) -> dict[str, Any]:
    """Return a model's generation_config.json as fields of `GenerationConfig`.

    ``max_length`` is ignored; `max_new_tokens` limits the number of new tokens.

    Args:
        config: the model's config, whose `generation_defaults` are the fields of
            generation_config.json.

    Raises:
        ConfigError: the file has an unsupported field that would change the generated tokens.
    """
    published = _without_start_token(config)
    problems = [
        f"{name}={published[name]!r}"
        for name, neutral in _UNSUPPORTED.items()
        if published.get(name) is not None and published[name] not in neutral
    ]
    if problems:
        raise ConfigError(
            f"generation_config.json sets unsupported options: {', '.join(problems)}. Remove "
            "them from the file, or set model.config.raw['generation_config'] = {}."
        )
    options = {name: published[name] for name in _SAME if published.get(name) is not None}
    if isinstance(options.get("top_k"), int) and options["top_k"] < 1:
        del options["top_k"]
    words = [tuple(word) for word in published.get("bad_words_ids") or ()]
    words += [(id,) for id in published.get("suppress_tokens") or ()]
    if words:
        options["bad_words_ids"] = tuple(words)
    return options
