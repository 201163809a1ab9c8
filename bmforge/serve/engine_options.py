"""Converts request bodies to engine options, and checks their limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from bmforge.errors import BmforgeError
from bmforge.infer import GenerationConfig
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.infer.engine.constraint import Constraint
from bmforge.serve.errors import RequestError
from bmforge.serve.idle_unloading import AnyEngine
from bmforge.serve.limits import check_at_most
from bmforge.serve.openai_types import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseFormat,
    StructuredOutputs,
)
from bmforge.serve.settings import RequestLimits

__all__ = [
    "check_limits",
    "find_constraint",
    "hidden_ids",
    "longest_answer",
    "longest_prompt",
    "row_tokens",
    "to_options",
]


_MOST_DIGITS = 10  # maximum number of digits of a token id; int() refuses more than 4,300


def row_tokens(engine: AnyEngine) -> int:
    """Return the maximum sequence length in tokens, of prompt and answer together."""
    return engine.config.tokens_of(engine.model)


def longest_prompt(engine: AnyEngine, limits: RequestLimits) -> int:
    """Return the maximum length of a prompt in tokens."""
    return min(limits.max_prompt_tokens or row_tokens(engine), row_tokens(engine))


def check_limits(body: GenerationRequest, limits: RequestLimits) -> None:
    """Check the counts in a request against the limits.

    Raises:
        RequestError: a count exceeds its limit.
    """
    check_at_most("n", body.count, limits.max_choices, "answers")
    check_at_most("stop", len(body.stops), limits.max_stops, "texts")
    check_at_most("logit_bias", len(body.logit_bias or ()), limits.max_logit_bias, "tokens")
    check_at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.max_logit_bias, "ids")
    check_at_most("bad_words", len(body.bad_words or ()), limits.max_logit_bias, "texts")
    for name, texts in (("stop", body.stops), ("bad_words", body.bad_words or [])):
        if not all(texts):
            raise RequestError(
                f"{name} contains an empty string. Remove the empty string.",
                name,
                code="invalid_value",
            )
        for text in texts:
            check_at_most(name, len(text), limits.max_stop_chars, "characters")
    if isinstance(body, ChatRequest):
        check_at_most("top_logprobs", body.top_logprobs or 0, limits.max_logprobs, "tokens")
        check_at_most("tools", len(body.tools or ()), limits.max_tools, "functions")
        images = sum(len(message.images) for message in body.messages)
        check_at_most("messages", images, limits.max_images, "images")
    if isinstance(body, CompletionRequest):
        check_at_most("logprobs", body.logprobs or 0, limits.max_logprobs, "tokens")
        check_at_most("prompt_logprobs", body.prompt_logprobs or 0, limits.max_logprobs, "tokens")
        check_at_most("prompt", len(body.prompts), limits.max_prompts, "prompts")
        check_at_most("n", body.count * len(body.prompts), limits.max_prompts, "answers in all")


def check_size(texts: Iterable[str], engine: AnyEngine, limits: RequestLimits, field: str) -> None:
    """Reject texts that cannot fit into the context, before spending time and memory on tokenizing.

    Args:
        texts: one text per prompt; with the field "messages", all texts belong to one prompt.
        engine: engine with the tokenizer.
        limits: limits on the contents of a request.
        field: request field that contains the texts.

    Raises:
        RequestError: a prompt has more bytes than the maximum number of tokens, each as long as the
            longest token.
    """
    tokens = longest_prompt(engine, limits)
    longest = longest_token_bytes(engine.tokenizer)
    sizes = [len(text.encode("utf-8", "replace")) for text in texts]
    size = sum(sizes) if field == "messages" else max(sizes, default=0)
    if size > tokens * longest:
        raise RequestError(
            f"{field} has {size} bytes, but a prompt may have at most {tokens} tokens of at "
            f"most {longest} bytes each. Shorten the prompt.",
            field,
            code="context_length_exceeded",
        )


@lru_cache(maxsize=4)
def longest_token_bytes(tokenizer: Any) -> int:
    """Return the length of the longest token in a vocabulary, in UTF-8 bytes."""
    return max(len(token.encode("utf-8", "replace")) for token in tokenizer.get_vocab())


def longest_answer(
    requested: int | None, prompt_tokens: int, engine: AnyEngine, limits: RequestLimits
) -> int:
    """Return the maximum length of an answer in tokens.

    Args:
        requested: requested length; None for the maximum.
        prompt_tokens: length of the prompt.
        engine: engine with the maximum sequence length.
        limits: limits on the contents of a request.

    Raises:
        RequestError: the prompt is too long, or the request exceeds the limit.
    """
    apart = engine.model.traits.is_encoder_decoder  # prompt and answer are separate sequences
    limit = row_tokens(engine)
    most_prompt = min(longest_prompt(engine, limits), limit if apart else limit - 1)
    if prompt_tokens > most_prompt:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, but this server accepts at most "
            f"{most_prompt}. Shorten the prompt.",
            code="context_length_exceeded",
        )
    space = limit if apart else limit - prompt_tokens
    most = min(space, limits.max_new_tokens or space)
    if requested is None:
        return most
    if requested > most:
        raise RequestError(
            f"max_tokens={requested} is too large: after a prompt of {prompt_tokens} tokens, at "
            f"most {most} tokens can be generated. Reduce max_tokens, or shorten the prompt.",
            "max_tokens",
            code="context_length_exceeded",
        )
    return requested


def to_options(
    body: GenerationRequest,
    engine: AnyEngine,
    max_new_tokens: int,
    ends: tuple[int, ...] | None,
    top_logprobs: int | None,
    stops: Sequence[str] = (),
) -> GenerationConfig:
    """Convert a request to generation options.

    Args:
        body: request body.
        engine: engine with the tokenizer.
        max_new_tokens: maximum length of each answer.
        ends: EOS tokens; None for the engine's default.
        top_logprobs: number of top log-probabilities per token; None for no log-probabilities.
        stops: stop strings in addition to those of the request.

    Raises:
        RequestError: the model does not support a field, or two fields contradict each other.
    """
    min_tokens = None if body.ignore_eos else body.min_tokens
    if min_tokens is not None and min_tokens > max_new_tokens:
        raise RequestError(
            f"min_tokens={min_tokens} is above max_tokens={max_new_tokens}. Reduce min_tokens, or "
            "increase max_tokens.",
            "min_tokens",
            code="invalid_value",
        )
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_tokens,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "bad_words_ids": bad_word_ids(body.bad_words or (), engine.tokenizer) or None,
        "logit_bias": _read_bias(body, engine) or None,
        "num_return_sequences": body.count,
        "num_beams": 1,
        "stop_strings": (*body.stops, *stops),
        "logprobs": top_logprobs,
        "eos_token_id": _end_tokens(body, engine, ends),
        **_sampling(body),
    }
    # Fields that are not given have the values of the model's generation_config.json.
    set_options = {name: value for name, value in options.items() if value is not None}
    try:
        return GenerationConfig(**set_options)
    except BmforgeError as error:
        raise RequestError(str(error), code="invalid_value") from error


def _sampling(body: GenerationRequest) -> dict[str, Any]:
    """Return the sampling options; OpenAI's default is to sample."""
    if body.is_greedy and body.count == 1:
        return {"do_sample": False}
    if body.is_greedy:  # all answers are equal, but each still needs a row
        return {"do_sample": True, "temperature": 1.0, "top_k": 1, "top_p": 1.0}
    return {
        "do_sample": True,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        # vLLM and llama.cpp choose a random seed for -1.
        "seed": None if body.seed in (None, -1) else body.seed % (1 << 63),
    }


def _end_tokens(
    body: GenerationRequest, engine: AnyEngine, ends: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return the tokens that end an answer; None for the engine's default."""
    more = tuple(body.stop_token_ids or ())
    size = engine.model.config.vocab_size
    if any(id >= size for id in more):
        raise RequestError(
            f"stop_token_ids contains {max(more)}, which is not a token id of this model "
            f"(allowed: 0 to {size - 1}). Correct the id.",
            "stop_token_ids",
            code="invalid_value",
        )
    if body.ignore_eos:
        return more
    if not more:
        return ends
    own = find_end_tokens(engine.model.config, engine.tokenizer) if ends is None else ends
    return tuple(dict.fromkeys((*own, *more)))


def hidden_ids(
    body: GenerationRequest, tokenizer: Any, marks: Iterable[str] = ()
) -> tuple[int, ...] | None:
    """Return the tokens whose text `skip_special_tokens` omits; None for the engine's default.

    Args:
        body: request body.
        tokenizer: the model's tokenizer.
        marks: delimiters of reasoning and tool calls; the output parsers remove them.
    """
    if not body.skip_special_tokens:
        return None if body.skip_special_tokens is None else ()
    kept = "".join(marks)
    ids = sorted(tokenizer.special_token_ids)
    return tuple(id for id in ids if tokenizer.decode([id]) not in kept)


def bad_word_ids(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words that must not be generated.

    A word at the start of a text and the same word after a space are different tokens for BPE
    tokenizers, so both are included, as in vLLM.
    """
    spellings = [text for word in words for text in (word, " " + word.lstrip(" "))]
    ids = [tuple(tokenizer.encode(text)) for text in dict.fromkeys(spellings)]
    return tuple(row for row in dict.fromkeys(ids) if row)


def _read_bias(body: GenerationRequest, engine: AnyEngine) -> dict[int, float]:
    biases = {}
    for text, bias in (body.logit_bias or {}).items():
        is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        if not (is_number and int(text) < engine.model.config.vocab_size):
            raise RequestError(
                f"logit_bias: {text[:20]!r} is not a token id of this model (allowed: 0 to "
                f"{engine.model.config.vocab_size - 1}). Correct the id.",
                "logit_bias",
                code="invalid_value",
            )
        biases[int(text)] = bias
    return biases


def find_constraint(
    form: ResponseFormat | None, outputs: StructuredOutputs | None
) -> Constraint | None:
    """Return the structured-output constraint that a request sets; None without a constraint.

    Raises:
        RequestError: several constraints are set, or a constraint is invalid.
    """
    rules: dict[str, Any] = {}
    if form is not None and form.type == "json_object":
        rules["response_format"] = Constraint.json_schema({"type": "object"})
    if form is not None and form.json_schema is not None:
        schema = form.json_schema.schema_
        rules["response_format"] = Constraint.json_schema({} if schema is None else schema)
    if outputs is not None:
        rules |= _read_outputs(outputs)
    if len(rules) > 1:
        raise RequestError(f"{', '.join(rules)} cannot be used together. Keep only one of them.")
    return next(iter(rules.values()), None)


def _read_outputs(outputs: StructuredOutputs) -> dict[str, Constraint]:
    name, constraints = "structured_outputs", {}
    try:
        if outputs.json_schema is not None:
            constraints[f"{name}.json"] = Constraint.json_schema(outputs.json_schema)
        if outputs.json_object:
            constraints[f"{name}.json_object"] = Constraint.json_schema({"type": "object"})
        if outputs.regex is not None:
            constraints[f"{name}.regex"] = Constraint.regex(outputs.regex)
        if outputs.choice is not None:
            constraints[f"{name}.choice"] = Constraint.choices(outputs.choice)
        if outputs.grammar is not None:
            constraints[f"{name}.grammar"] = Constraint.lark(outputs.grammar)
    except BmforgeError as error:
        raise RequestError(str(error), name, code="invalid_value") from error
    if not constraints:
        raise RequestError(
            f"{name} contains no constraint. Set one of json, json_object, regex, choice and "
            "grammar.",
            name,
        )
    return constraints
