"""Constrained decoding by a JSON schema, a regular expression, choices or a grammar.

llguidance (extra ``constrain``) computes the allowed next tokens. Unsupported constraints raise an
error before generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.infer.engine.one_of import replace_one_of
from bmforge.infer.engine.text_stream import token_data
from bmforge.tokenizers import CPM2Tokenizer, FastTokenizer

__all__ = ["Constraint", "Matcher", "ConstraintCompiler"]


@dataclass(frozen=True)
class Constraint:
    """Constraint on an answer; created by `json_schema`, `regex`, `choices` or `lark`.

    Args:
        kind: language of `source`: a JSON schema, a regular expression (Rust syntax; also used for
            choices), or a Lark grammar.
        source: schema, pattern or grammar as a string.
        free_after: texts and token ids, such as the start of a tool call; an answer that begins
            with one of them is not constrained (default: none).
    """

    kind: Literal["json", "regex", "lark"]
    source: str
    free_after: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the source is empty."""
        if not self.source:
            raise ConfigError(
                f"Constraint: source={self.source!r} is empty, but kind={self.kind!r} needs a "
                "schema, pattern or grammar."
            )

    @property
    def supported_source(self) -> str:
        """Source for llguidance, which supports anyOf, but not oneOf."""
        if self.kind != "json" or "oneOf" not in self.source:
            return self.source
        return json.dumps(replace_one_of(json.loads(self.source)))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """Create a constraint that allows only JSON that matches a schema; ``{}`` matches all."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"the JSON schema is not valid JSON ({error}). Correct the schema."
            ) from error
        if not isinstance(parsed, dict):
            raise ConfigError(f"the JSON schema must be a JSON object, not {text[:60]!r}.")
        return cls("json", text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Create a constraint that allows only full matches of a pattern (Rust regex syntax)."""
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Self:
        """Create a constraint that allows only one of the given strings."""
        if isinstance(texts, str) or not texts or not all(texts):
            raise ConfigError(
                f"choices={texts!r} must contain at least one string and no empty strings."
            )
        return cls("lark", "start: " + " | ".join(map(json.dumps, texts)))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Create a constraint from a grammar in Lark's format with the start rule ``start``."""
        return cls("lark", grammar)


class ConstraintCompiler:
    """Compiles constraints for one tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits per position.
        ends: ids of the EOS tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, tuple(ends)

    def open(self, constraint: Constraint) -> Matcher:
        """Compile a constraint, and return the matcher of a new answer.

        Raises:
            ConfigError: the constraint is invalid or not supported.
            MissingDependencyError: llguidance is not installed.
        """
        guide = _import()
        grammar = _write_grammar(guide, constraint)
        is_wrong, messages = guide.LLMatcher.validate_grammar_with_warnings(grammar, self._guided)
        if is_wrong or messages:
            raise ConfigError(
                f"the {constraint.kind} constraint is not valid ({' '.join(messages)[:500]}). "
                "Correct the constraint."
            )
        matcher = guide.LLMatcher(self._guided, grammar, log_level=0)
        return Matcher(matcher, self._vocab_size)

    @cached_property
    def _guided(self) -> Any:
        """Tokenizer in llguidance's format."""
        guide, tokenizer = _import(), self._tokenizer
        # If there are no end tokens, an id outside of the vocabulary is used as end token.
        ends = list(self._ends) or [self._vocab_size]
        size = max(self._vocab_size, len(tokenizer), max(ends) + 1)
        if isinstance(tokenizer, CPM2Tokenizer) and tokenizer.implies_spaces:
            raise ConfigError(
                f"constraints are not supported with this {type(tokenizer).__name__}, because "
                "this tokenizer does not represent every space of a text. Leave the constraint "
                "out."
            )
        plain = _GuidanceTokenizer(tokenizer, size, ends)
        return guide.LLTokenizer(guide.TokenizerWrapper(plain), n_vocab=size, eos_token=ends)


class Matcher:
    """State of the constraint of one answer.

    Args:
        matcher: llguidance's matcher for this answer.
        vocab_size: number of logits per position.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> Matcher:
        """Return an independent copy of the matcher."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> Tensor | None:
        """Return the mask of allowed next tokens, (V,); None if the answer is complete.

        Raises:
            ConfigError: the constraint exceeds llguidance's limits.
        """
        if self._matcher.is_stopped():
            self._check()
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size])
        return mask.bool() if bool(mask.any()) else None

    def take(self, token: int) -> None:
        """Advance the state by one allowed token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                f"the constraint failed during generation ({self._matcher.get_error()[:500]}). "
                "Simplify the constraint."
            )


class _GuidanceTokenizer:
    """Adapts a tokenizer to llguidance's interface.

    llguidance can read the definition of a FastTokenizer itself, but it then encodes a special
    token's name within the constraint's texts as the special token, instead of as ordinary text.
    """

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_id
        special = {*ends, *tokenizer.special_ids.values()} - {
            tokenizer.role_id(role) for role in ("space", "newline")
        }
        if isinstance(tokenizer, FastTokenizer):
            added = json.loads(tokenizer.definition).get("added_tokens") or ()
            special |= {token["id"] for token in added if token.get("special")}
        named = {id: token for token, id in tokenizer.get_vocab().items()}
        self.special_token_ids = sorted(id for id in special if id is not None)
        self.tokens = [
            f"<{id}>".encode() if id in special or id not in named else self._spell(named[id], id)
            for id in range(size)
        ]
        unknown = [id for id in range(size) if id not in named and id not in special]
        self.special_token_ids += unknown

    def _spell(self, token: str, id: int) -> bytes:
        return token_data(self._tokenizer, token, id)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "ignore")
        if isinstance(self._tokenizer, FastTokenizer):
            return self._tokenizer.encode_plain([text])[0]
        ids: list[int] = self._tokenizer.encode(text)
        return ids


def _import() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("llguidance", "constrain", "constrained generation") from error
    return llguidance


def _write_grammar(guide: Any, constraint: Constraint) -> str:
    """Convert a constraint to llguidance's grammar format."""
    matcher = guide.LLMatcher
    if constraint.free_after:
        return _or_free(_write_grammar(guide, replace(constraint, free_after=())), constraint)
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(constraint.source))
    if constraint.kind == "lark":
        return str(matcher.grammar_from_lark(constraint.source))
    # Allow only the usual whitespace: if any is allowed, some models generate it without end.
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        return str(matcher.grammar_from_json_schema(constraint.supported_source, overrides=form))
    except ValueError as error:
        raise ConfigError(
            f"the JSON schema is not supported ({error}). Simplify the schema."
        ) from error


def _or_free(grammar: str, constraint: Constraint) -> str:
    """Extend a grammar: after up to two newlines and a text of `free_after`, any tokens follow."""
    is_lark = constraint.kind == "lark"
    answer = {"lark_grammar": grammar} if is_lark else json.loads(grammar)["grammars"][0]
    starts = (f"<[{s}]>" if isinstance(s, int) else json.dumps(s) for s in constraint.free_after)
    main = f"start: @answer | /\\n{{0,2}}/ begin <[*]>*\nbegin: {' | '.join(starts)}"
    return json.dumps({"grammars": [{"lark_grammar": main}, {**answer, "name": "answer"}]})
