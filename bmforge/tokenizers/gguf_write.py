"""Converts tokenizers to GGUF metadata for llama.cpp and for `gguf_read`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from bmforge.errors import ConfigError, DataError
from bmforge.logging import get_logger
from bmforge.tokenizers.base import Tokenizer
from bmforge.tokenizers.fast import FastTokenizer
from bmforge.tokenizers.gguf_read import (
    BYTE,
    CONTROL,
    NORMAL,
    OWN,
    PRE,
    ROLE_KEYS,
    SPACE,
    UNKNOWN,
    UNUSED,
    PreTokenizer,
    pairs_of_scores,
)

__all__ = ["describe_tokenizer"]


def describe_tokenizer(
    tokenizer: Tokenizer, rows: int, template: str | None = None
) -> dict[str, Any]:
    """Return the GGUF metadata that describes a tokenizer.

    Args:
        tokenizer: BPE, sentencepiece (BPE or unigram) or WordPiece tokenizer.
        rows: number of rows of the model's embedding, each of which needs a token; unused rows get
            placeholder tokens.
        template: chat template to include; None for none.

    Raises:
        ConfigError: GGUF cannot represent the tokenizer, or it has more tokens than `rows`.
    """
    settings = tokenizer.settings if isinstance(tokenizer, FastTokenizer) else {"model": {}}
    name = _kind_of(settings)
    if name is None:
        raise _unsupported(f"the tokenizer class {type(tokenizer).__name__}")
    tokens, types = _list_tokens(tokenizer, settings, rows)
    own = _KINDS[name](settings, tokens, types)
    metadata = {
        "tokenizer.ggml.model": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{key}": value for key, value in own.items()},
    }
    for role, id in tokenizer.special_ids.items():
        if role in ROLE_KEYS:
            metadata[f"tokenizer.ggml.{ROLE_KEYS[role]}_token_id"] = id
    if name == "bert" and "cls" in tokenizer.special_ids:
        metadata["tokenizer.ggml.bos_token_id"] = tokenizer.special_ids["cls"]
    first, last = _ends(tokenizer, settings)
    metadata |= {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.add_eos_token": last}
    return {**metadata, "tokenizer.chat_template": template} if template else metadata


def _unsupported(what: str) -> ConfigError:
    """Return the error for a property of the tokenizer that GGUF cannot represent."""
    return ConfigError(
        f"GGUF does not support {what} (supported: byte-level BPE of GPT-2, Llama 3 and Qwen2, BPE "
        "and unigram models of sentencepiece, WordPiece of BERT). To export the model without a "
        "tokenizer, move the tokenizer's files out of the model directory."
    )


def _kind_of(settings: dict[str, Any]) -> str | None:
    model = settings["model"]
    kind = model.get("type")
    if kind == "BPE":
        return "llama" if model.get("byte_fallback") or _replaces_spaces(settings) else "gpt2"
    return {"Unigram": "t5", "WordPiece": "bert"}.get(kind)


def _list_tokens(
    tokenizer: Tokenizer, settings: dict[str, Any], rows: int
) -> tuple[list[str], list[int]]:
    """Return the token and the GGUF token type of each embedding row."""
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    if largest >= rows:
        raise ConfigError(
            f"the tokenizer has ids up to {largest}, but the model has {rows} embedding rows. "
            "Use the tokenizer of the model."
        )
    tokens = [f"[PAD{id}]" for id in range(rows)]
    types = [UNUSED] * rows
    unknown = settings["model"].get("unk_token")
    has_bytes = settings["model"].get("byte_fallback")
    for token, id in vocabulary.items():
        is_byte = has_bytes and len(token) == 6 and token.startswith("<0x")
        tokens[id] = token
        types[id] = BYTE if is_byte else UNKNOWN if token == unknown else NORMAL
    if settings["model"].get("unk_id") is not None:
        types[settings["model"]["unk_id"]] = UNKNOWN
    for added in settings.get("added_tokens", ()):
        if types[added["id"]] != UNKNOWN:
            types[added["id"]] = CONTROL if added["special"] else OWN
    return tokens, types


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or post-processor; sequences are flattened."""
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        if part is not None and key in part:
            for child in part[key]:
                yield from _steps(child)
            return
    if part is not None:
        yield part


def _replaces_spaces(settings: dict[str, Any]) -> bool:
    kinds = [step for key in ("normalizer", "pre_tokenizer") for step in _steps(settings.get(key))]
    return any(step["type"] in ("Prepend", "Metaspace") for step in kinds)


def _byte_pairs(settings: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    cuts, composes = list(_steps(settings.get("pre_tokenizer"))), False
    for step in _steps(settings.get("normalizer")):
        if step["type"] != "NFC":
            raise _unsupported(f"the tokenizer's normalizer {step['type']}")
        composes = True
    letters = [step for step in cuts if step["type"] == "ByteLevel"]
    splits = [step["pattern"].get("Regex") for step in cuts if step["type"] == "Split"]
    if len(letters) != 1 or letters[0].get("add_prefix_space") or len(cuts) != 1 + len(splits):
        raise _unsupported(f"the tokenizer's pre-tokenizer {[step['type'] for step in cuts]}")
    takes_words = bool(settings["model"].get("ignore_merges"))
    target = PreTokenizer(tuple(splits) if splits else None, composes, takes_words)
    # `adds_begin` is not compared, because the key add_bos_token specifies it.
    names = (
        name for name, candidate in PRE.items() if candidate._replace(adds_begin=False) == target
    )
    name = next(names, None)
    if name is None:
        raise _unsupported(f"the tokenizer's pre-tokenizer pattern {splits or 'GPT-2'!r}")
    merges = settings["model"]["merges"]
    if not merges:
        raise _unsupported("a byte-level BPE tokenizer without merges")
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    return {"pre": name, "merges": pairs}


def _sentence_pairs(
    settings: dict[str, Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    """Return metadata with scores that imply the same merges as the tokenizer's merge list."""
    merges = settings["model"]["merges"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
    ranks: dict[str, int] = {}
    for rank, (a, b) in enumerate(pairs):
        ranks.setdefault(a + b, rank)
    scores = [0.0] * len(tokens)
    ids = {token: id for id, token in enumerate(tokens) if types[id] == NORMAL}
    for token, id in ids.items():
        scores[id] = -float(ranks.get(token, len(pairs)))
    try:
        implied = pairs_of_scores({token: scores[id] for token, id in ids.items()}, ids)
    except DataError as error:
        raise _unsupported(f"the tokenizer's vocabulary: {error}".rstrip(".")) from error
    if set(implied) != set(pairs):
        raise _unsupported("the tokenizer's merges, which scores of tokens cannot represent")
    kinds = [s for key in ("normalizer", "pre_tokenizer") for s in _steps(settings.get(key))]
    leads = any(
        s["type"] == "Prepend" or s.get("prepend_scheme", "never") != "never" for s in kinds
    )
    return {"pre": "default", "scores": scores, "add_space_prefix": leads}


def _unigram(settings: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    vocabulary = settings["model"]["vocab"]
    scores = [float(score) for _, score in vocabulary]
    scores += [-1000.0 if kind == UNUSED else 0.0 for kind in types[len(scores) :]]
    steps = list(_steps(settings.get("normalizer")))
    spaces = [s for s in _steps(settings.get("pre_tokenizer")) if s["type"] == "Metaspace"]
    metadata: dict[str, Any] = {
        "pre": "default",
        "scores": scores,
        "add_space_prefix": any(s.get("prepend_scheme") != "never" for s in spaces),
        "remove_extra_whitespaces": any(s["type"] in ("Replace", "Strip") for s in steps),
    }
    for step in steps:
        if step["type"] == "Precompiled":
            metadata["precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
    return metadata


def _word_pieces(settings: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Mark starts of words instead of continuations in WordPiece `tokens`, in place."""
    if not (settings.get("normalizer") or {}).get("lowercase"):
        get_logger().warning(
            "llama.cpp lowercases all text for WordPiece tokenizers, but the exported tokenizer is "
            "cased, so its token ids differ in llama.cpp."
        )
    for id, token in enumerate(tokens):
        if not (token.startswith("[") and token.endswith("]")):
            tokens[id] = token[2:] if token.startswith("##") else SPACE + token
    return {}


def _ends(tokenizer: Tokenizer, settings: dict[str, Any]) -> tuple[bool, bool]:
    """Return two booleans: whether BOS is prepended to texts, and whether EOS is appended."""
    config = settings.get("config", {})
    single: list[Any] = []
    for step in _steps(settings.get("post_processor")):
        single = step.get("single", single)
    ends = (*single[:1], *single[-1:]) or ({}, {})
    marks = [part.get("SpecialToken", {}).get("id") for part in ends]
    tokens = {role: tokenizer.decode([id]) for role, id in tokenizer.special_ids.items()}
    first = config.get("add_bos_token", marks[0] is not None and marks[0] == tokens.get("bos"))
    last = config.get("add_eos_token", marks[-1] is not None and marks[-1] == tokens.get("eos"))
    return bool(first), bool(last)


_KINDS: dict[str, Callable[[dict[str, Any], list[str], list[int]], dict[str, Any]]] = {
    "gpt2": _byte_pairs,
    "llama": _sentence_pairs,
    "t5": _unigram,
    "bert": _word_pieces,
}
