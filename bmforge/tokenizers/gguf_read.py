"""Converts the tokenizer in a GGUF file's metadata to a tokenizer.json.

Supported types: "gpt2" (byte-level BPE), "llama" (SentencePiece BPE, whose merges are derived from
scores), "t5" (SentencePiece unigram) and "bert" (WordPiece).
Source: llama.cpp's ``llama-vocab.cpp`` and ``convert_hf_to_gguf.py``; the pre-tokenizers' regular
expressions are from the tokenizer.json of Llama 3 and Qwen2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bmforge.errors import DataError
from bmforge.gguf_header import GgufHeader
from bmforge.tokenizers.spiece import UnigramModel, build_unigram
from bmforge.tokenizers.tokenizer_json import add_begin_and_end_

__all__ = ["BYTE", "CONTROL", "NORMAL", "OWN", "PRE", "ROLE_KEYS", "SPACE", "UNKNOWN", "UNUSED",
           "GgufTokenizer", "PreTokenizer", "pairs_of_scores", "read_gguf_tokenizer"]  # fmt: skip

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
# Role -> its name in metadata keys.
ROLE_KEYS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # spelling of the GGUF format
    "pad": "padding",
    "mask": "mask",
    "cls": "cls",
}
_LONGEST_PIECE = 512
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """Pre-tokenization rules for one value of `tokenizer.ggml.pre`.

    Args:
        expressions: regular expressions, applied in order; each splits the parts from the previous
            one into matches and the text between them. If None, the tokenizers library's
            implementation of GPT-2's expression is used.
        composes: True to normalize text to Unicode's NFC first.
        takes_words: True if a word in the vocabulary is encoded as one token even without merges
            (``ignore_merges``).
        adds_begin: True if BOS is prepended to prompts, unless the file specifies otherwise.
    """

    expressions: tuple[str, ...] | None = None
    composes: bool = False
    takes_words: bool = False
    adds_begin: bool = False


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+%s"
    r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*%s"
    r"|\p{N}%s|" + _TAIL
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = PreTokenizer((_CUT % "{1,3}",), takes_words=True, adds_begin=True)
_QWEN2 = PreTokenizer((_CUT % "",), composes=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
# Names with the same expression in llama.cpp's llama-vocab.cpp share an entry.
PRE = {
    "gpt-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_CUT % "{1,3}",))),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), PreTokenizer((_CUT % "",))),
    **dict.fromkeys(("mpt", "olmo", "jais", "phi-2", "gigachat", "roberta-bpe"), PreTokenizer()),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), PreTokenizer()),
    **dict.fromkeys(("modern-bert", "a.x-4.0", "mellum", "trillion"), PreTokenizer()),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    "tekken": PreTokenizer((_CASED % ("", "", ""),), takes_words=True, adds_begin=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2"), PreTokenizer((_CASED % (_SUFFIX, _SUFFIX, "{1,3}"),))
    ),
    "qwen35": PreTokenizer((_MARKED,), composes=True),
}
# Tokenizer keys that are supported, or have no effect on token ids.
_READ = {
    *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("precompiled_charsmap", "eot_token_id", "eom_token_id", "prefix_token_id"),
    *("suffix_token_id", "middle_token_id", "mask_token_id"),
    *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *(f"{key}_token_id" for key in ROLE_KEYS.values()),
}
# Other keys -> value that has no effect.
_NEUTRAL: dict[str, Any] = {
    "add_sep_token": False,
    "escape_whitespaces": True,
    "treat_whitespace_as_suffix": False,
}


class GgufTokenizer(NamedTuple):
    """Tokenizer data from a GGUF file.

    Args:
        content: contents of a tokenizer.json.
        roles: mapping from role to its special token.
        settings: further fields of a tokenizer_config.json.
    """

    content: bytes
    roles: dict[str, str]
    settings: dict[str, Any]


class _Vocabulary(NamedTuple):
    """Validated vocabulary of a GGUF file: tokens, types and scores in id order."""

    path: Path
    metadata: dict[str, Any]
    tokens: list[str]
    types: list[int]
    scores: list[float]

    def of(self, *types: int) -> dict[str, int]:
        """Return a dict from token to id, for all tokens of the given GGUF token types."""
        return {t: i for i, t in enumerate(self.tokens) if self.types[i] in types}

    def damaged(self, reason: str) -> DataError:
        return DataError(
            f"the tokenizer in {str(self.path)!r} is damaged ({reason}). Download the file again."
        )


def read_gguf_tokenizer(header: GgufHeader) -> GgufTokenizer:
    """Convert the tokenizer in a GGUF file's metadata.

    Raises:
        DataError: the file has no tokenizer, or its tokenizer is unsupported or inconsistent.
    """
    kind: Any = header.metadata.get("tokenizer.ggml.model")
    build = _KINDS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise DataError(
            f"{str(header.path)!r} has a tokenizer of the unsupported type {kind!r} (supported: "
            f"{', '.join(_KINDS)}). Use the tokenizer in the directory of the original model."
        )
    _check_keys(header, kind)
    vocabulary = _read_vocabulary(header)
    try:
        tokenizer = build(vocabulary)
    except DataError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise vocabulary.damaged(str(error)) from error
    _add_special(tokenizer, vocabulary)
    ids = {role: header.metadata.get(f"tokenizer.ggml.{key}_token_id")
           for role, key in ROLE_KEYS.items()}  # fmt: skip
    if kind == "bert":
        ids["cls"] = ids["cls"] if ids["cls"] is not None else ids["bos"]
    roles = {}
    for role, id in ids.items():
        if id is not None:
            token = tokenizer.id_to_token(id) if type(id) is int and 0 <= id < 1 << 31 else None
            if token is None:
                raise vocabulary.damaged(f"the {role} token has the unknown id {id!r}")
            roles[role] = token
    data, defaults = header.metadata, _default_bos_eos(header, kind)
    values = {name: data.get(f"tokenizer.ggml.{name}", usual) for name, usual in defaults.items()}
    settings: dict[str, Any] = {name: v for name, v in values.items() if isinstance(v, bool)}
    add_begin_and_end_(tokenizer, roles, settings)
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return GgufTokenizer(tokenizer.to_str().encode(), roles, settings)


def _default_bos_eos(header: GgufHeader, kind: str) -> dict[str, bool | None]:
    """Return llama.cpp's defaults of `add_bos_token` and `add_eos_token`; None for no default."""
    rules = PRE.get(str(header.metadata.get("tokenizer.ggml.pre")))
    begins = kind == "llama" or (kind == "gpt2" and rules is not None and rules.adds_begin)
    return {"add_bos_token": begins or None, "add_eos_token": True if kind == "t5" else None}


def _check_keys(header: GgufHeader, kind: str) -> None:
    """Raise `DataError` for unsupported metadata keys that would change token ids."""
    prefix = "tokenizer.ggml."
    names = [key.removeprefix(prefix) for key in header.metadata if key.startswith(prefix)]
    neutral = {**_NEUTRAL, **({"add_sep_token": True} if kind == "bert" else {})}
    wrong = [
        f"{prefix}{name}={header.metadata[prefix + name]!r}"
        for name in names
        if name not in _READ and neutral.get(name, ...) != header.metadata[prefix + name]
    ]
    if wrong:
        raise DataError(
            f"{str(header.path)!r} has tokenizer settings that are not supported: "
            f"{', '.join(wrong)}. Use the tokenizer in the directory of the original model."
        )


def _read_vocabulary(header: GgufHeader) -> _Vocabulary:
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    types = _numbers(metadata.get("tokenizer.ggml.token_type"), [NORMAL] * count)
    scores = _numbers(metadata.get("tokenizer.ggml.scores"), [0.0] * count)
    vocabulary = _Vocabulary(header.path, metadata, tokens or [], types, scores)
    if not count or not (len(types) == len(scores) == count):
        raise vocabulary.damaged(
            f"the vocabulary has {count} tokens, but {len(types)} types and {len(scores)} scores"
        )
    if len(set(vocabulary.tokens)) != count:
        raise vocabulary.damaged(f"only {len(set(vocabulary.tokens))} of {count} tokens differ")
    if not all(math.isfinite(score) for score in scores):
        raise vocabulary.damaged("tokenizer.ggml.scores contains a value that is not finite")
    return vocabulary


def _numbers(array: Any, default: list[Any]) -> list[Any]:
    return default if array is None else array.tolist() if hasattr(array, "tolist") else []


def _add_special(tokenizer: Any, vocabulary: _Vocabulary) -> None:
    """Add special and user-defined tokens, which are matched verbatim in texts, in id order."""
    from tokenizers import AddedToken

    for id, token in enumerate(vocabulary.tokens):
        if vocabulary.types[id] not in (CONTROL, OWN):
            continue
        added = [AddedToken(token, normalized=False)]
        if vocabulary.types[id] == CONTROL:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
        if (got := tokenizer.token_to_id(token)) != id:
            raise vocabulary.damaged(f"the token {token!r} has the id {id} instead of {got}")


def _model_vocabulary(vocabulary: _Vocabulary, *types: int) -> dict[str, int]:
    """Return the base vocabulary as a dict from token to id.

    Added tokens are excluded if their ids follow all other ids, as in published files. Otherwise
    they are included, because only the base vocabulary can assign other ids.
    """
    own = vocabulary.of(*types)
    added = vocabulary.of(CONTROL, OWN)
    first = max(own.values(), default=-1) + 1
    is_tail = sorted(added.values()) == list(range(first, first + len(added)))
    return own if is_tail else {**own, **added}


def _byte_pairs(gguf: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models
    from tokenizers import normalizers as norm
    from tokenizers import pre_tokenizers as pre

    name = gguf.metadata.get("tokenizer.ggml.pre")
    rules = PRE.get(name) if isinstance(name, str) else None
    if rules is None:
        raise DataError(
            f"{str(gguf.path)!r} has the pre-tokenizer tokenizer.ggml.pre={name!r}, which is "
            f"not supported (supported: {', '.join(PRE)}). Use the tokenizer in the directory "
            "of the original model."
        )
    merges = gguf.metadata.get("tokenizer.ggml.merges", [])
    # Both parts of a merge may begin with a space, but never end with one.
    places = [(text, text.find(" ", 1)) for text in merges]
    if any(space < 0 for _, space in places):
        raise gguf.damaged("tokenizer.ggml.merges contains a string that is not a pair of tokens")
    pairs = [(text[:space], text[space + 1 :]) for text, space in places]
    vocabulary = _model_vocabulary(gguf, NORMAL, BYTE)
    model = models.BPE(vocabulary, pairs, ignore_merges=rules.takes_words)
    tokenizer = Tokenizer(model)
    if rules.composes:
        tokenizer.normalizer = norm.NFC()
    if rules.expressions is None:
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        cuts = [pre.Split(Regex(expression), "isolated") for expression in rules.expressions]
        letters = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre.Sequence([*cuts, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pairs_of_scores(pieces: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Derive BPE merges from sentencepiece scores, in order of priority.

    Sentencepiece merges the two adjacent pieces whose concatenation has the highest score.
    Therefore, each way to split a piece into two pieces is a merge, ordered by the piece's score.

    Args:
        pieces: mapping from piece to score.
        ids: mapping from piece to id; ids break ties between equal scores.

    Raises:
        DataError: a piece is too long.
    """
    pairs = []
    for piece in sorted(pieces, key=lambda piece: (-pieces[piece], ids[piece])):
        if len(piece) > _LONGEST_PIECE:
            raise DataError(f"a token has {len(piece)} characters (limit: {_LONGEST_PIECE}).")
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        cuts = [(a, b) for a, b in cuts if a in pieces and b in pieces]
        pairs += sorted(cuts, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    return pairs


def _sentence_pairs(gguf: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models
    from tokenizers import normalizers as norm

    ids = gguf.of(NORMAL)
    pairs = pairs_of_scores({piece: gguf.scores[id] for piece, id in ids.items()}, ids)
    unknown = next(iter(gguf.of(UNKNOWN)), None)
    falls_back = len(gguf.of(BYTE)) == 256
    vocabulary = _model_vocabulary(gguf, NORMAL, UNKNOWN, BYTE)
    model = models.BPE(
        vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=falls_back
    )
    tokenizer = Tokenizer(model)
    leads = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = norm.Replace(" ", SPACE)
    tokenizer.normalizer = norm.Sequence([norm.Prepend(SPACE), spaces] if leads else [spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leads else steps)
    return tokenizer


def _unigram(gguf: _Vocabulary) -> Any:
    # Placeholders for embedding rows beyond the vocabulary have the token type "unused".
    last = max(gguf.of(NORMAL, UNKNOWN, CONTROL, OWN, BYTE).values(), default=-1)
    pieces = list(zip(gguf.tokens, gguf.scores, gguf.types, strict=True))[: last + 1]
    unknown = next(iter(gguf.of(UNKNOWN).values()), None)
    if unknown is None:
        raise gguf.damaged("the vocabulary has no unknown token")
    characters = gguf.metadata.get("tokenizer.ggml.precompiled_charsmap")
    model = UnigramModel(
        pieces,
        1,
        unknown,
        len(gguf.of(BYTE)) == 256,
        b"" if characters is None else characters.tobytes(),
        gguf.metadata.get("tokenizer.ggml.add_space_prefix", True) is True,
        gguf.metadata.get("tokenizer.ggml.remove_extra_whitespaces", True) is True,
    )
    return build_unigram(model, extra_ids=0)


def _word_pieces(vocabulary: _Vocabulary) -> Any:
    """Build a WordPiece tokenizer; GGUF marks the starts of words instead of continuations."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    named = [_as_word_piece(token) for token in vocabulary.tokens]
    ids = {token: id for id, token in enumerate(named) if vocabulary.types[id] != UNUSED}
    if len(ids) != sum(kind != UNUSED for kind in vocabulary.types):
        raise vocabulary.damaged("two tokens are the same word piece")
    unknown = _as_word_piece(next(iter(vocabulary.of(UNKNOWN)), "[UNK]"))
    if unknown not in ids:
        raise vocabulary.damaged("the vocabulary has no unknown token")
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown))
    # The file has no setting for lowercasing; it is inferred from a vocabulary without upper case.
    is_lower = not any(token != token.lower() for token in named if not _is_name(token))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _is_name(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _as_word_piece(token: str) -> str:
    if _is_name(token):
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"


_KINDS: dict[str, Callable[[_Vocabulary], Any]] = {
    "gpt2": _byte_pairs,
    "llama": _sentence_pairs,
    "t5": _unigram,
    "bert": _word_pieces,
}
