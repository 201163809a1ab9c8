"""Validates requests, and converts them to token ids, complete options and new answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bmforge.errors import ConfigError
from bmforge.infer.decoder_factory import check_inputs
from bmforge.infer.end_tokens import find_hidden_tokens
from bmforge.infer.engine.answers import Answer, Vocabulary
from bmforge.infer.engine.constraint import ConstraintCompiler, Matcher
from bmforge.infer.engine.packed_step import can_pack
from bmforge.infer.engine.reasoning_span import MatcherAfterReasoning
from bmforge.infer.engine.request import Request
from bmforge.infer.generation import check_prompt, complete_config
from bmforge.infer.openbmb.texts import encode_cpm_ant_prompt, read_span
from bmforge.infer.options import GenerationConfig
from bmforge.infer.sampling import prompt_ngrams
from bmforge.tokenizers import CPM2Tokenizer
from bmforge.tune.delta.selection import DeltaNames, check_names
from bmforge.tune.delta.soft_prompt import put_rows_before

__all__ = ["PromptReader", "PreparedRequest", "is_document"]


def is_document(model: Any, request: Request) -> bool:
    """Return True if the request's text is a CPM-Bee document with an answer to fill."""
    return model.traits.objective == "documents" and isinstance(request.prompt, str)


def _forbid_ngrams(config: GenerationConfig, ids: Sequence[int]) -> GenerationConfig:
    """Replace the option encoder_no_repeat_ngram_size by the n-grams of a prompt."""
    if not config.encoder_no_repeat_ngram_size:
        return config
    words = prompt_ngrams(ids, config.encoder_no_repeat_ngram_size)
    return config.replace(
        encoder_no_repeat_ngram_size=0, bad_words_ids=(*config.bad_words_ids, *words)
    )


@dataclass(frozen=True)
class PreparedRequest:
    """Validated request with token ids and with all generation options set.

    Args:
        request: original request.
        ids: token ids of the prompt or of the encoder's input; empty for a document.
        config: generation options, complete with EOS tokens and seed.
        answers: the `num_return_sequences` answers to generate, initially empty.
        is_packed: whether the request is batched with others.
        deltas: adapter names, as in `Request`.
    """

    request: Request
    ids: tuple[int, ...]
    config: GenerationConfig
    answers: tuple[Answer, ...]
    is_packed: bool
    deltas: DeltaNames = None


class PromptReader:
    """Validates requests for one model, and converts them to token ids and options.

    Args:
        model: model that the engine runs.
        tokenizer: the model's tokenizer; None if there is none.
        limit: planned maximum batch size in sequences and maximum sequence length in tokens; None
            without a memory budget.
    """

    def __init__(self, model: Any, tokenizer: Any, limit: tuple[int, int] | None) -> None:
        self._model, self._tokenizer, self._limit = model, tokenizer, limit
        self._vocabulary = Vocabulary(tokenizer)
        self._can_pack = can_pack(model)
        self._rules: dict[tuple[int, ...], ConstraintCompiler] = {}

    @property
    def is_limited(self) -> bool:
        """Whether the engine has a memory budget."""
        return self._limit is not None

    def read(self, request: Request) -> PreparedRequest:
        """Validate a request, and convert it to token ids, sampling options and limits.

        Raises:
            ConfigError: the options contradict each other, the model or the engine's limits.
            ShapeError: ids are outside of the vocabulary.
        """
        model, options = self._model, request.options
        config = complete_config(model, options, tokenizer=self._tokenizer, returns_text=True)
        if config.seed is None and config.do_sample:
            config = config.replace(seed=secrets.randbits(63))
        self._check(request, config)
        check_inputs(model, request.inputs)
        deltas = check_names(model, request.delta)
        ids: tuple[int, ...] = ()
        read_ids = ids
        hidden = request.hidden_ids
        if hidden is None:
            hidden = () if self._tokenizer is None else find_hidden_tokens(self._tokenizer)
        if not is_document(model, request):
            ids, config, marks = self._read_prompt(request.prompt, config)
            hidden = (*hidden, *marks)
            read_ids = ids
            if model.traits.objective != "hidden tokens":  # which also need other inputs per token
                ids = put_rows_before(model, ids, deltas)
            row = torch.tensor([ids])
            check_prompt(model, row, torch.ones_like(row), config)
            config = _forbid_ngrams(config, read_ids)
        is_packed = self._can_pack and config.num_beams == 1
        if config.prompt_logprobs is not None and not is_packed:
            raise ConfigError(
                f"prompt_logprobs={config.prompt_logprobs} needs a decoder-only model that "
                "supports batched requests, and num_beams=1 (the model is a "
                f"{type(model).__name__}, num_beams={config.num_beams}). Leave it out."
            )
        self._check_size(len(ids), config, is_packed)
        answers = self._answers(request, config, read_ids, hidden)
        return PreparedRequest(request, tuple(ids), config, answers, is_packed, deltas)

    def _read_prompt(
        self, prompt: str | Sequence[int], config: GenerationConfig
    ) -> tuple[tuple[int, ...], GenerationConfig, Sequence[int]]:
        """Return the prompt's ids, the config with EOS tokens, and the ids to omit from texts."""
        model, tokenizer = self._model, self._tokenizer
        if not isinstance(prompt, str):
            ids = tuple(prompt)
            if not ids or not all(isinstance(id, int) for id in ids):
                raise ConfigError(
                    f"prompt={str(prompt)[:60]} must be a string or a non-empty list of token ids."
                )
            return ids, config, ()
        if tokenizer is None:
            raise ConfigError(
                "text prompts need a tokenizer. Pass token ids, or create the engine with "
                "Engine(model, tokenizer=...)."
            )
        is_span = isinstance(tokenizer, CPM2Tokenizer) and model.traits.is_encoder_decoder
        has_form = is_span or model.traits.objective == "hidden tokens"
        ids = tuple(tokenizer.encode(prompt) if has_form else tokenizer.encode_prompt(prompt))
        if not ids or not prompt:
            raise ConfigError(f"the prompt is empty: prompt={prompt!r}. Pass a non-empty string.")
        if model.traits.objective == "hidden tokens":
            return tuple(encode_cpm_ant_prompt(tokenizer, ids)), config, ()
        if is_span:
            source, ends = read_span(model, tokenizer, ids)
            more = tuple(dict.fromkeys((*config.eos_tokens, *ends)))
            config = replace(config, eos_token_id=more)
            return tuple(source), config, tokenizer.sentinel_ids[:2]
        return ids, config, ()

    def _check(self, request: Request, config: GenerationConfig) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        fills = is_document(self._model, request)
        has_beams = config.num_beams > 1
        needs_text = request.constraint is not None or config.returns_logprobs
        needs_text = needs_text or request.thoughts is not None or bool(request.hidden_ids)
        if (has_beams or fills) and (needs_text or config.stop_strings):
            what = "the documents of CPM-Bee" if fills else f"num_beams={config.num_beams}"
            hint = "" if fills else ", or set num_beams=1"
            raise ConfigError(
                "constraint, thoughts, stop_strings, hidden_ids and logprobs need token-by-token "
                f"generation and cannot be used with {what}. Leave them out{hint}."
            )
        if request.constraint is not None and config.min_new_tokens:
            raise ConfigError(
                f"min_new_tokens={config.min_new_tokens} cannot be used with a constraint, "
                "which determines where an answer ends. Leave one of them out."
            )
        searches = has_beams and self._model.traits.objective == "hidden tokens"
        if (fills or searches) and config.num_return_sequences > 1:
            raise ConfigError(
                f"num_return_sequences={config.num_return_sequences} must be 1 for a "
                f"{type(self._model).__name__}, whose beam search returns one answer. Send several "
                "requests instead."
            )
        if config.stop_strings and self._tokenizer is None:
            raise ConfigError(
                "stop_strings need a tokenizer. Create the engine with Engine(model, "
                "tokenizer=...)."
            )

    def _check_size(self, tokens: int, config: GenerationConfig, is_packed: bool) -> None:
        """Raise `ConfigError` if a request exceeds the planned memory."""
        if self._limit is None:
            return
        if not is_packed and self._can_pack:
            raise ConfigError(
                f"num_beams={config.num_beams} is not supported for batched requests. Call "
                "engine.generate, or leave num_beams out."
            )
        rows = config.num_beams if config.num_beams > 1 else config.num_return_sequences
        longest = tokens + config.max_new_tokens
        if (not is_packed and rows > self._limit[0]) or longest > self._limit[1]:
            raise ConfigError(
                f"the request needs {rows} sequences of {longest} tokens, more than the engine's "
                f"memory plan allows (max_rows={self._limit[0]}, max_tokens={self._limit[1]}). "
                "Request less, or create the engine with a larger EngineConfig."
            )

    def _answers(
        self, request: Request, config: GenerationConfig, ids: Sequence[int], hidden: Sequence[int]
    ) -> tuple[Answer, ...]:
        """Create a request's answers, still empty.

        Penalties apply to the same tokens as in `generate`.
        """
        matcher: Matcher | MatcherAfterReasoning | None = None
        if request.constraint is not None:
            if self._tokenizer is None:
                raise ConfigError(
                    "a constraint needs a tokenizer. Create the engine with Engine(model, "
                    "tokenizer=...)."
                )
            ends, size = config.eos_tokens, self._model.config.vocab_size
            if ends not in self._rules:
                self._rules[ends] = ConstraintCompiler(self._tokenizer, size, ends)
            matcher = self._rules[ends].open(request.constraint)
            if request.thoughts is not None:
                matcher = MatcherAfterReasoning(matcher, request.thoughts, size, ends)
        penalized_ids: Sequence[int] = ids
        before = () if self._model.traits.is_encoder_decoder else ids
        if self._model.traits.is_encoder_decoder:
            penalized_ids = (self._model.config.decoder_start_token_id,)
        return tuple(
            Answer(
                index,
                config,
                penalized_ids,
                self._vocabulary,
                hidden,
                before,
                None if matcher is None else matcher.copy(),
                request.thoughts,
            )
            for index in range(config.num_return_sequences)
        )
