"""Batched text generation: `generate` and `stream_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer.beam import beam_search
from bmforge.infer.decoder import Decoder
from bmforge.infer.decoder_factory import check_inputs, start_decoder
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.infer.generation_defaults import read_generation_defaults
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import (
    Words,
    check_scores,
    choose_tokens,
    is_one_of,
    process_scores,
    prompt_ngrams,
)
from bmforge.models.causal_lm import CausalLM
from bmforge.nn.prompt import count_ids, with_prompt
from bmforge.surgery import eval_mode
from bmforge.tune.delta import find_delta, list_deltas
from bmforge.tune.delta.selection import BASE_NAME

if TYPE_CHECKING:
    from bmforge.models.seq2seq import Seq2Seq

__all__ = [
    "check_prompt",
    "complete_config",
    "generate",
    "run_decoder",
    "stream_tokens",
]


def generate(
    model: CausalLM | Seq2Seq,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    config: GenerationConfig | None = None,
    on_token: Callable[[Tensor], None] | None = None,
    adapter_names: Sequence[str | None] | None = None,
    stop: Callable[[Tensor], Tensor] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Continue prompts by greedy decoding, sampling or beam search, as in transformers.

    Dropout is disabled during the call; afterwards every module returns to its previous mode.
    During the call, weights and hooks of the model's blocks may only be changed inside `on_token`.

    Args:
        model: decoder or encoder-decoder of `bmforge.models`.
        input_ids: prompts, padded on the left; for an encoder-decoder the sources, padded anywhere.
        attention_mask: 1 for tokens, 0 for padding; if None, `pad_token_id` marks the padding,
            unless it is also an EOS token.
        config: generation options; default `GenerationConfig()`.
        on_token: called with the (B,) tokens of every step as they are chosen (not in beam search).
        adapter_names: adapter name of each prompt; None in the list means the base model.
        stop: stopping criterion, a function from the (B * num_return_sequences,) tokens of a step
            to a boolean tensor that is True for the sequences that end (not in beam search).
        inputs: further inputs of the model for the prompts, such as `pixel_values`, as the
            processor of a vision-language model returns them (see `Processor.encode`).
        options: fields of `GenerationConfig` that replace those of `config`.

    Shape:
        input_ids, attention_mask: (B, T)
        returns (B * num_return_sequences, T + new), padded on the right with `pad_token_id`; for
        an encoder-decoder the targets, (B * num_return_sequences, 1 + new), start token first

    Raises:
        ConfigError: an option is unknown, out of range or without effect, or the model's head does
            not generate text.
        ShapeError: a prompt is empty, padded on the right, or too long for the model.
    """
    if "delta_rows" in options:  # the argument's name in earlier versions
        adapter_names = options.pop("delta_rows")
    config = complete_config(model, (config or GenerationConfig()).replace(**options))
    if (on_token is not None or stop is not None) and config.num_beams > 1:
        raise ConfigError(
            f"on_token and stop cannot be used with num_beams={config.num_beams}, because beam "
            "search selects its tokens only at the end. Leave them out, or set num_beams=1."
        )
    adapter_names = _known_rows(model, adapter_names)
    check_inputs(model, inputs)
    _check_tensors(input_ids=input_ids, attention_mask=attention_mask)
    input_ids, attention_mask, added = with_prompt(model.whole().embed, input_ids, attention_mask)
    mask = check_prompt(model, input_ids, attention_mask, config)
    with eval_mode(model), torch.no_grad():
        length = config.max_new_tokens
        decoder, start = start_decoder(model, input_ids, mask, length, adapter_names, inputs)
        padding = _count_padding(start, None if model.traits.is_encoder_decoder else mask)
        with decoder.undisturbed() if on_token is None else nullcontext():
            words = _forbidden_words(input_ids, config)
            ids = run_decoder(decoder, start, padding, config, on_token, stop, words)
    return ids if model.traits.is_encoder_decoder else ids[:, added:]


def _known_rows(
    model: CausalLM | Seq2Seq, rows: Sequence[str | None] | None
) -> Sequence[str | None] | None:
    """Return the validated adapter name of each prompt; None if the model has no adapters."""
    for name in dict.fromkeys(rows or ()):
        if name not in (None, BASE_NAME):
            find_delta(model, name)
    return rows if list_deltas(model) else None


def run_decoder(
    decoder: Decoder,
    start: Tensor,
    padding: Tensor,
    config: GenerationConfig,
    on_token: Callable[[Tensor], None] | None = None,
    stop: Callable[[Tensor], Tensor] | None = None,
    words: Sequence[Words] = (),
) -> Tensor:
    """Generate with a new decoder according to `config`.

    Args:
        decoder: decoder that computes the logits.
        start: first input tokens of every sequence.
        padding: number of leading tokens of each sequence that repetition penalties ignore.
        config: generation options, complete with end and padding tokens.
        on_token, stop: arguments of `generate`.
        words: token sequences that must not be generated, for each prompt.

    Shape:
        start: (B, T); padding: (B,); returns (B * num_return_sequences, T + new)

    Raises:
        ConfigError: the option encoder_no_repeat_ngram_size is set, but not `words`.
    """
    if config.encoder_no_repeat_ngram_size and not words:
        raise ConfigError(
            f"encoder_no_repeat_ngram_size={config.encoder_no_repeat_ngram_size} is not supported "
            "for the prompt format of this model (only for plain prompts). Set it to 0."
        )
    if config.num_beams > 1:
        return beam_search(decoder, start, padding, config, words)[0]
    ids = start
    for ids in _choose_rows(decoder, start, padding, config, stop, words):
        if on_token is not None:
            on_token(ids[:, -1])
    return ids


def stream_tokens(
    model: CausalLM | Seq2Seq,
    input_ids: Tensor,
    config: GenerationConfig | None = None,
    attention_mask: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens of each step as they are chosen; together they equal those of `generate`.

    Args:
        model, input_ids, config, attention_mask: arguments of `generate`; beam search is not
            supported.

    Shape:
        input_ids, attention_mask: (B, T); yields (B * num_return_sequences,)

    Raises:
        ConfigError, ShapeError: same as in `generate`.
    """
    config = complete_config(model, config or GenerationConfig())
    if config.num_beams > 1:
        raise ConfigError(
            f"num_beams={config.num_beams} cannot be streamed, because beam search selects its "
            "tokens only at the end. Use generate, or set num_beams=1."
        )
    input_ids, attention_mask, _ = with_prompt(model.whole().embed, input_ids, attention_mask)
    mask = check_prompt(model, input_ids, attention_mask, config)
    with eval_mode(model), torch.no_grad():
        decoder, start = start_decoder(model, input_ids, mask, config.max_new_tokens)
    padding = _count_padding(start, None if model.traits.is_encoder_decoder else mask)
    words = _forbidden_words(input_ids, config)
    steps = _choose_rows(decoder, start, padding, config, words=words)
    while True:
        with eval_mode(model), torch.no_grad():  # not while the consumer of this generator runs
            ids = next(steps, None)
        if ids is None:
            return
        yield ids[:, -1]


def _choose_rows(
    decoder: Decoder,
    prompt: Tensor,
    padding: Tensor,
    config: GenerationConfig,
    stop: Callable[[Tensor], Tensor] | None = None,
    words: Sequence[Words] = (),
) -> Iterator[Tensor]:
    """Yield the ids of all sequences after every step (views of one tensor), until all end."""
    generator = None
    if config.seed is not None:
        generator = torch.Generator(prompt.device).manual_seed(config.seed)
    times, length = config.num_return_sequences, prompt.shape[1]
    scores = decoder.repeat(times, decoder.run(prompt))
    padding = padding.repeat_interleave(times)
    ids = prompt.new_zeros(prompt.shape[0] * times, length + config.max_new_tokens)
    ids[:, :length] = prompt.repeat_interleave(times, 0)
    ended = torch.zeros_like(ids[:, 0], dtype=torch.bool)
    for step in range(config.max_new_tokens):
        if step:
            scores = decoder.run(ids[:, length - 1 : length])
        scores = process_scores(scores, ids[:, :length], step, padding, config, words)
        check_scores(scores[~ended])
        tokens = choose_tokens(scores, config, generator, ended)
        can_end = bool(config.eos_tokens) or stop is not None
        if can_end:
            tokens = tokens.masked_fill(ended, config.pad_token_id or 0)
            ended = ended | is_one_of(tokens, config.eos_tokens)
        ids[:, length] = tokens
        length += 1
        yield ids[:, :length]
        if stop is not None:
            ended = ended | stop(tokens)
        if can_end and bool(ended.all()):
            break


def _forbidden_words(input_ids: Tensor, config: GenerationConfig) -> Sequence[Words]:
    """Return the n-grams of each prompt that are not generated; () if the option is off."""
    ngram = config.encoder_no_repeat_ngram_size
    return [prompt_ngrams(row, ngram) for row in input_ids.tolist()] if ngram else ()


def complete_config(
    model: CausalLM | Seq2Seq,
    config: GenerationConfig,
    *,
    tokenizer: Any = None,
    returns_text: bool = False,
) -> GenerationConfig:
    """Fill in options from the model's files: end and padding tokens, sampling parameters.

    Args:
        model: the model that generates.
        config: generation options of the caller.
        tokenizer: the model's tokenizer, whose end token is added; None to use the files only.
        returns_text: whether the caller returns text and log-probabilities, not only token ids.

    Raises:
        ConfigError: the model's head does not generate text, or an option has no effect.
    """
    if not model.traits.can_generate:
        raise ConfigError(
            f"a model with the head {model.config.head!r} does not generate text. Load it with "
            "head='language_model', or head='sequence_to_sequence' for an encoder-decoder."
        )
    idle = [] if returns_text else config.given("stop_strings", "logprobs", "prompt_logprobs")
    if idle:
        raise ConfigError(
            f"generate does not support {', '.join(idle)}, because it returns token ids only. "
            "Use Engine.generate with texts, or Engine.submit."
        )
    config = config.with_defaults(read_generation_defaults(model.config))
    if config.eos_token_id is None:
        eos = find_end_tokens(model.config, tokenizer)
    else:
        eos = config.eos_tokens
    pad = config.pad_token_id
    if pad is None:
        values = {**model.config.raw, **vars(model.config), **model.config.generation_defaults}
        pad = values.get("pad_token_id")
    pad = None if pad is None or pad < 0 else pad  # older configs write -1 for no padding token
    if pad is None and eos:
        pad = eos[0]
    if config.min_new_tokens and not eos:
        raise ConfigError(
            f"min_new_tokens={config.min_new_tokens} has no effect without an end-of-sequence "
            "token. Set eos_token_id, or leave min_new_tokens out."
        )
    return config.replace(eos_token_id=eos, pad_token_id=pad)


def check_prompt(
    model: CausalLM | Seq2Seq,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
) -> Tensor | None:
    """Validate a prompt for the model; return its mask, or None if there is no padding."""
    is_integer = not input_ids.is_floating_point() and input_ids.dtype != torch.bool
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not is_integer:
        raise ShapeError(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype} (needed: "
            "integers of shape (B, T) with at least one token). For one prompt use "
            "input_ids[None]."
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    table: Any = model.whole().embed
    if low < 0 or high >= count_ids(table):
        raise ShapeError(
            f"input_ids contains ids from {low} to {high} (the model has "
            f"vocab_size={model.config.vocab_size}{_describe_prompt(table)}). Use the model's own "
            "tokenizer."
        )
    named = [*config.logit_bias, *(id for word in config.bad_words_ids for id in word)]
    if named and max(named) >= count_ids(table):
        raise ConfigError(
            f"logit_bias or bad_words_ids contains id {max(named)}, but the model has "
            f"vocab_size={model.config.vocab_size}. Use ids of the model's own tokenizer."
        )
    is_decoder = not model.traits.is_encoder_decoder
    _check_length(model, input_ids.shape[1], config.max_new_tokens, is_decoder)
    pad, is_given = config.pad_token_id, attention_mask is not None
    if attention_mask is None and pad is not None and pad not in config.eos_tokens:
        attention_mask = input_ids != pad
    if attention_mask is None:
        return None
    mask = _check_mask(input_ids, attention_mask, is_decoder)
    # A soft prompt is in front of the padding, so rows of a model with a soft prompt may have a
    # gap. A mask computed from the ids has a gap if a text contains the padding token.
    if mask is not None and is_given and is_decoder and not _describe_prompt(table):
        _check_gaps(mask)
    return mask


def _check_length(model: CausalLM | Seq2Seq, length: int, added: int, is_decoder: bool) -> None:
    """Raise `ConfigError` if a sequence exceeds the model's positions.

    `is_decoder` is True for a decoder, which continues the prompt. In an encoder-decoder the limit
    applies to source and target separately.
    """
    limit = model.position_limit
    needed = length + added if is_decoder else max(length, added)
    if limit is not None and needed > limit:
        raise ConfigError(
            f"{length} prompt tokens and max_new_tokens={added} need {needed} positions, but "
            f"the model has max_seq_len={model.config.max_seq_len}. Truncate the prompt on the "
            "left, or request fewer new tokens."
        )


def _check_tensors(**values: Any) -> None:
    """Raise `ShapeError` if ids are missing or a value is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and (value is not None or name == "input_ids"):
            raise ShapeError(
                f"{name} is a {type(value).__name__} (allowed: a tensor of integers of shape "
                "(B, T)). Use torch.tensor([[...]]) for ids, or Engine.generate for texts."
            )


def _describe_prompt(table: Any) -> str:
    """Describe the soft prompt in the embedding `table` for error messages; "" without one."""
    more = count_ids(table) - table.num_embeddings
    return f" and a soft prompt of {more} vectors" if more else ""


def _check_mask(input_ids: Tensor, attention_mask: Tensor, is_decoder: bool) -> Tensor | None:
    """Validate the mask of a decoder (`is_decoder`: padded on the left) or of an encoder."""
    if attention_mask.shape != input_ids.shape:
        raise ShapeError(
            f"attention_mask has shape {tuple(attention_mask.shape)} (needed: the shape of "
            f"input_ids, {tuple(input_ids.shape)}). Pass one value for each token id."
        )
    mask = (attention_mask != 0).long()
    if bool(mask.all()):
        return None
    if not is_decoder and not bool(mask.any(1).all()):
        rows = (~mask.any(1)).nonzero()[:, 0].tolist()
        raise ShapeError(f"sequences {rows} contain only padding. Remove these sequences.")
    if is_decoder and not bool(mask[:, -1].all()):
        rows = (mask[:, -1] == 0).nonzero()[:, 0].tolist()
        raise ShapeError(
            f"sequences {rows} end with padding, so no token can be generated after them. Pad on "
            "the left, with attention_mask=0 before the tokens."
        )
    return mask


def _check_gaps(mask: Tensor) -> None:
    """Raise `ShapeError` if a sequence has padding between its tokens."""
    rows = (mask.diff(dim=1) < 0).any(1).nonzero()[:, 0].tolist()
    if rows:
        raise ShapeError(
            f"sequences {rows} have padding between tokens. Pad on the left, with attention_mask=0 "
            "before the tokens."
        )


def _count_padding(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of leading padding tokens of each sequence, (B,)."""
    if mask is None:
        return torch.zeros_like(input_ids[:, 0])
    return mask.argmax(1)
