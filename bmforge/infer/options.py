"""Generation options (`GenerationConfig`) for `generate` and the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from bmforge.errors import ConfigError, suggest

__all__ = ["GenerationConfig"]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Generation options with the names and defaults of transformers, except that top-k is off.

    Fields that are not set are read from the model's generation_config.json. If a field is missing
    there, the default of this class applies.

    Args:
        max_new_tokens: maximum number of generated tokens per continuation.
        min_new_tokens: minimum number of generated tokens before an EOS token.
        do_sample: sample instead of greedy decoding.
        temperature: divisor of the logits before sampling; 0 means greedy decoding, without the
            other sampling options.
        top_k: number of most likely tokens to sample from; None or 0 means all.
        top_p: total probability of the most likely tokens to sample from; None or 1 means all.
        min_p: minimum probability of a sampled token, relative to the most likely one (Nguyen et
            al. 2024); None or 0 means no minimum.
        repetition_penalty: factor above 1 that makes tokens of the prompt and the text less
            likely (Keskar et al. 2019).
        presence_penalty: value subtracted from the logits of all tokens in the answer so far.
        frequency_penalty: value subtracted from a generated token's logit once per occurrence
            (OpenAI); the prompt does not count.
        no_repeat_ngram_size: length in tokens of n-grams that may occur only once; 0 for no limit.
        encoder_no_repeat_ngram_size: length in tokens of n-grams of the prompt that are not
            generated; 0 for no limit.
        bad_words_ids: token sequences that are not generated.
        logit_bias: dict from token id to the value that is added to the token's logit.
        forced_bos_token_id: first token after the start token of an encoder-decoder (mBART's
            target language); None means no such token.
        forced_eos_token_id: token, or one of several, that is generated as token number
            `max_new_tokens` if the text has not ended before; None means no such token.
        begin_suppress_tokens: token ids that are not generated as the first token.
        num_beams: number of beams of a beam search; 1 for no beam search.
        length_penalty: exponent of the length; beam scores are divided by the result.
        early_stopping: end of a beam search. False: by a heuristic; True: as soon as `num_beams`
            beams are finished; "never": only when no better beam is possible.
        num_return_sequences: number of continuations per prompt, in adjacent rows.
        eos_token_id: one or several EOS tokens; None means those in config.json, () means none.
        pad_token_id: padding token of sequences that ended early; None means the one in config.json
            or, without one, the first EOS token.
        stop_strings: strings before which the text ends; only for requests to an engine, which
            decodes text.
        logprobs: number of most likely tokens whose log-probabilities are returned with that of
            each generated token; only for requests to an engine. None means no log-probabilities.
        logprobs_mode: kind of log-probabilities. "raw_logprobs": computed from the model's logits;
            "processed_logprobs": computed from the sampled distribution, after penalties,
            temperature, top-k, top-p and min-p (-inf for an excluded token).
        prompt_logprobs: number of most likely tokens whose log-probabilities are returned with
            that of each prompt token; only for requests to an engine. The prompt is then computed
            without the prefix cache. None means no log-probabilities.
        seed: random seed of sampling; None means torch's global generator or, in an engine, a
            new seed.

    Attributes:
        fields_set: names of the explicitly given fields.
    """

    fields_set: ClassVar[frozenset[str]] = frozenset()

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    prompt_logprobs: int | None = None
    seed: int | None = None

    def __new__(cls, **options: Any) -> Self:
        """Create a config and record which fields are given explicitly."""
        self = super().__new__(cls)
        object.__setattr__(self, "fields_set", frozenset(options))
        return self

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that lists invalid values and options without effect.

        Lists are converted to tuples first.
        """
        for name in _TUPLES:
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        problems = [
            f"{name}={getattr(self, name)!r} must be {needed}"
            for name, needed, fits in _RANGES
            if not _has_type(name, getattr(self, name)) or not fits(getattr(self, name))
        ]
        if not problems:
            self._apply_zero_temperature()
            problems = self._contradictions()
        if problems:
            raise ConfigError(f"GenerationConfig: {'; '.join(problems)}.")

    def _apply_zero_temperature(self) -> None:
        """Convert a temperature of 0 to greedy decoding without sampling options, as vLLM does."""
        if self.temperature >= _GREEDY_BELOW:
            return
        for name, off in (("do_sample", (False,)), *_SAMPLING):
            object.__setattr__(self, name, off[0])
        # Counts as given, so that the model's generation_config.json does not enable sampling.
        object.__setattr__(self, "fields_set", self.fields_set | {"do_sample"})

    def _contradictions(self) -> list[str]:
        problems = []
        if self.min_new_tokens > self.max_new_tokens:
            problems.append(
                f"min_new_tokens={self.min_new_tokens} is above "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.do_sample and self.num_beams > 1:
            problems.append(
                f"do_sample=True and num_beams={self.num_beams} cannot be used together"
            )
        # If `do_sample` is not given, the model's generation_config.json may still enable sampling.
        if not self.do_sample and "do_sample" in self.fields_set:
            idle = [name for name, off in _SAMPLING if getattr(self, name) not in off]
            problems += [f"{name}={getattr(self, name)} needs do_sample=True" for name in idle]
        is_greedy = not self.do_sample and "do_sample" in self.fields_set
        if is_greedy and self.num_return_sequences > self.num_beams:
            problems.append(
                f"num_return_sequences={self.num_return_sequences} needs do_sample=True or at "
                f"least as many beams (num_beams={self.num_beams})"
            )
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            problems.append("length_penalty and early_stopping need num_beams above 1")
        if self.num_beams > 1 and self.logprobs is not None:
            problems.append("logprobs and num_beams above 1 cannot be used together")
        if self.num_beams > 1 and self.prompt_logprobs is not None:
            problems.append("prompt_logprobs and num_beams above 1 cannot be used together")
        if self.logprobs_mode == "processed_logprobs" and not self.returns_logprobs:
            problems.append(
                "logprobs_mode='processed_logprobs' has no effect without logprobs or "
                "prompt_logprobs (for example logprobs=0)"
            )
        return problems

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """End tokens as a tuple; empty if there are none."""
        if self.eos_token_id is None:
            return ()
        return (
            (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)
        )

    @property
    def forced_end(self) -> tuple[int, ...]:
        """Tokens of `forced_eos_token_id` as a tuple; empty if there are none."""
        forced = self.forced_eos_token_id
        return () if forced is None else (forced,) if isinstance(forced, int) else forced

    @property
    def returns_logprobs(self) -> bool:
        """Whether log-probabilities of the answer or of the prompt are returned."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def given(self, *names: str) -> list[str]:
        """Return ``name=value`` for each of the named fields that differs from its default."""
        plain = type(self)()
        values = [(name, getattr(self, name)) for name in names]
        return [f"{name}={value!r}" for name, value in values if value != getattr(plain, name)]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed.

        Raises:
            ConfigError: a field does not exist (the message suggests the nearest), or the
                result is invalid.
        """
        fields = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in fields:
                raise ConfigError(
                    f"unknown option of generate: {name!r} (supported: "
                    f"{', '.join(fields)}).{suggest(name, fields)}"
                )
        own_fields = {name: getattr(self, name) for name in self.fields_set}
        return type(self)(**own_fields | changes)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return a copy in which fields that are not given have the model's own defaults.

        A default that contradicts a given option is dropped: if the caller selects beam search or
        greedy decoding, the model's sampling options are dropped; if the caller selects sampling,
        the model's number of beams is dropped.

        Args:
            defaults: values of the model's generation_config.json, by field name.

        Returns:
            copy in which all fields count as explicitly given
        """
        own_fields = {name: getattr(self, name) for name in self.fields_set}
        free = {name: value for name, value in defaults.items() if name not in own_fields}
        if own_fields.get("num_beams", 1) > 1:
            free.pop("do_sample", None)
        if own_fields.get("do_sample"):
            free.pop("num_beams", None)
        merged = free | own_fields
        unused = set[str]()
        if not merged.get("do_sample"):
            unused |= {name for name, _ in _SAMPLING}
            if merged.get("num_return_sequences", 1) > merged.get("num_beams", 1):
                unused.add("num_return_sequences")
        if merged.get("num_beams", 1) == 1:
            unused |= {"length_penalty", "early_stopping"}
        shortest = min(merged.get("min_new_tokens", 0), merged.get("max_new_tokens", 20))
        if "min_new_tokens" in free:
            free["min_new_tokens"] = shortest
        used = {name: value for name, value in free.items() if name not in unused}
        try:
            return dataclasses.replace(type(self)(**used | own_fields))
        except ConfigError as error:
            if not used:
                raise
            raise ConfigError(
                f"{error} Some of these values come from the model's generation_config.json."
            ) from error


def _as_tuple(value: Any) -> Any:
    """Convert a list, and lists within it, to tuples; return other values unchanged."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _has_type(name: str, value: Any) -> bool:
    """Return True if an option's value is an integer or a float, as the option requires."""
    if name in _WHOLE:
        return value is None or (isinstance(value, int) and not isinstance(value, bool))
    return name not in _FRACTIONS or value is None or isinstance(value, int | float)


def _are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(word, tuple) and word and all(isinstance(id, int) and id >= 0 for id in word)
        for word in value
    )


def _are_ids(value: Any) -> bool:
    ids = () if value is None else value if isinstance(value, tuple) else (value,)
    return all(isinstance(id, int) and id >= 0 for id in ids)


def _are_biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(id, int) and id >= 0 and math.isfinite(bias) for id, bias in value.items()
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


_TUPLES = (
    *("bad_words_ids", "eos_token_id", "forced_eos_token_id", "begin_suppress_tokens"),
    "stop_strings",
)
_WHOLE = {
    *("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "num_beams"),
    *("num_return_sequences", "logprobs", "forced_bos_token_id", "encoder_no_repeat_ngram_size"),
}
_FRACTIONS = {
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    "frequency_penalty",
}
# Temperatures below this are 0 in vLLM: dividing logits by them could overflow.
_GREEDY_BELOW = 1e-5
# Pairs of an option and the values that disable it.
_SAMPLING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("temperature", (1.0,)),
    ("top_k", (None, 0)),
    ("top_p", (None, 1.0)),
    ("min_p", (None, 0.0)),
    ("seed", (None,)),
)
_RANGES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("max_new_tokens", "an integer of at least 1", lambda v: v >= 1),
    ("min_new_tokens", "at least 0", lambda v: v >= 0),
    (
        "temperature",
        "at least 0 and finite (0 means greedy decoding)",
        lambda v: 0 <= v < math.inf,
    ),
    ("top_k", "an integer of at least 0, or None", lambda v: v is None or v >= 0),
    ("top_p", "above 0 and at most 1, or None", lambda v: v is None or 0 < v <= 1),
    ("min_p", "from 0 to 1, or None", lambda v: v is None or 0 <= v <= 1),
    ("repetition_penalty", "above 0", lambda v: v > 0),
    ("presence_penalty", "finite", math.isfinite),
    ("frequency_penalty", "finite", math.isfinite),
    ("no_repeat_ngram_size", "at least 0", lambda v: v >= 0),
    ("encoder_no_repeat_ngram_size", "at least 0", lambda v: v >= 0),
    ("bad_words_ids", "a tuple of non-empty tuples of token ids", _are_words),
    ("logit_bias", "a mapping from token ids to finite numbers", _are_biases),
    ("forced_bos_token_id", "a token id, or None", lambda v: v is None or v >= 0),
    ("forced_eos_token_id", "one or several token ids, or None", _are_ids),
    ("begin_suppress_tokens", "a tuple of token ids", _are_ids),
    ("num_beams", "an integer of at least 1", lambda v: v >= 1),
    ("early_stopping", "False, True or 'never'", lambda v: v in (False, True, "never")),
    ("num_return_sequences", "at least 1", lambda v: v >= 1),
    ("stop_strings", "a tuple of non-empty strings", _are_texts),
    ("logprobs", "at least 0, or None", lambda v: v is None or v >= 0),
    (
        "logprobs_mode",
        "raw_logprobs or processed_logprobs",
        lambda v: v in ("raw_logprobs", "processed_logprobs"),
    ),
    ("prompt_logprobs", "at least 0, or None", lambda v: v is None or v >= 0),
)
