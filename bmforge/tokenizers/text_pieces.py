"""Cuts a long text into pieces whose token ids, one after the other, are those of the whole text.

The tokenizers library needs some hundred bytes of memory per token of a text, so a document of
millions of short words needs gigabytes as a whole. A text is only cut between a letter or digit and
a separator (a space, a line end, a Chinese punctuation mark) that a letter or digit follows, and
only if the tokenizer is known to split there:

- The model (BPE, WordPiece, unigram, word level) encodes each part of the pre-tokenizer on its own.
- The supported pre-tokenizers end a part before the separator. They decide this from the two
  characters, or with an expression whose match ends after the letter and looks no further ahead.
- The supported normalizers neither join the two characters nor depend on the text around them.

Any other tokenizer encodes whole texts.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from bmforge.tokenizers.gguf_read import PRE

__all__ = ["PIECE_CHARACTERS", "cut_text", "find_separators"]

PIECE_CHARACTERS = 1 << 16
_SPACES, _MARKS = " \n", "，。！？；：、"
# Expressions that match neither separators nor across them, and those that end parts there.
_WITHIN = frozenset((r"\p{N}", r"\p{N}{1,1}", r"\p{N}{1,3}", r"\p{Han}"))
_ENDING = frozenset(part for pre in PRE.values() for part in pre.expressions or ()) - _WITHIN
_LOCAL_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt")
)
_LOCAL_NORMALIZERS |= {"Precompiled"}


def find_separators(tokenizer: Any) -> str:
    """Return the separators before which texts may be cut; "" if the tokenizer needs whole texts.

    Args:
        tokenizer: tokenizer of the tokenizers library.
    """
    settings = json.loads(tokenizer.to_str())
    if settings["model"].get("dropout") or not _are_cuttable(settings.get("added_tokens") or ()):
        return ""
    pre = _parts(settings.get("pre_tokenizer"), "pretokenizers")
    strips = False
    for step in _parts(settings.get("normalizer"), "normalizers"):
        is_space_run = step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}
        strips |= step["type"] == "Strip" and step["strip_left"]
        if step["type"] not in _LOCAL_NORMALIZERS | {"Strip"} and not is_space_run:
            return ""
    # A space that is stripped from a piece must be replaced by the prefix of the first word.
    if strips and not (pre and pre[0].get("prepend_scheme") == "always"):
        return ""
    return "".join(mark for mark in _SPACES + _MARKS if _splits(tokenizer.normalizer, pre, mark))


def cut_text(text: str, separators: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield pieces of a text, which begin with one of `separators` except for the first.

    Pieces have about `size` characters; a piece is longer if no cut is possible earlier.
    """
    begin = 0
    if separators and len(text) > size:
        # Letters and digits (without "_") on both sides of a separator.
        last_letter = re.compile(rf"[^\W_](?=[{re.escape(separators)}][^\W_])")
        while match := last_letter.search(text, begin + size):
            while match and not _is_old_letter(match[0]):
                match = last_letter.search(text, match.end())
            if match is None:
                break
            yield text[begin : match.end()]
            begin = match.end()
    yield text[begin:]


def _is_old_letter(character: str) -> bool:
    """Return True for letters and digits of Unicode 3.2, on which all libraries agree."""
    return unicodedata.ucd_3_2_0.category(character)[0] in "LN"


def _are_cuttable(added: Any) -> bool:
    """Return True if no added token can contain, or depend on, the place of a cut."""
    around = re.compile(rf"[^\W_][{_SPACES}{_MARKS}][^\W_]")
    for token in added:
        name = token["content"]
        is_word = name[:1] in {*_SPACES, *_MARKS} and token["single_word"]
        if not token["special"] and (around.search(name) or is_word or token["rstrip"]):
            return False
    return True


def _parts(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the normalizers or pre-tokenizers of a setting, with sequences resolved."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[key] for part in _parts(inner, key)]


def _splits(normalizer: Any, pre: list[dict[str, Any]], mark: str) -> bool:
    """Return True if the pre-tokenizers split between a letter or digit and a separator."""
    shown = normalizer.normalize_str(f"a{mark}a") if normalizer else f"a{mark}a"
    if shown not in (f"a{mark}a", "a a"):
        return False
    results = [_splits_one(step, shown[1]) for step in pre]
    return None not in results and True in results


def _splits_one(step: dict[str, Any], mark: str) -> bool | None:
    """Return True if a pre-tokenizer splits before a mark, False if it may not.

    None means that the parts may depend on the text on both sides.
    """
    kind = step["type"]
    if kind == "ByteLevel":
        if step["add_prefix_space"] and mark != " ":
            return None  # a piece that begins with a space gets no other
        return bool(step.get("use_regex", True))
    if kind == "Metaspace":
        return True if mark == " " and step.get("split", True) else None
    if kind == "Split":
        return _splits_by(step)
    if kind in ("BertPreTokenizer", "Whitespace"):
        return True
    if kind == "WhitespaceSplit":
        return mark in _SPACES
    return False if kind == "Digits" else None


def _splits_by(step: dict[str, Any]) -> bool | None:
    expression = step["pattern"].get("Regex")
    behavior = (step["behavior"], bool(step["invert"]))
    if behavior not in (("Isolated", False), ("Removed", True)):
        return None
    if behavior[0] == "Isolated" and expression in _WITHIN:
        return False
    return True if expression in _ENDING else None
