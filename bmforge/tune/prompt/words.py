"""Parses and tokenizes label words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.word_encoder import has_chinese

__all__ = ["Words", "check_left", "check_shared", "read_words", "spell_word"]

Words = Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]]


def read_words(words: Words) -> tuple[list[str], list[list[str]]]:
    """Parse the `words` option; return the class names and the words of each class.

    Raises:
        ConfigError: a class has no words, or a word is empty or not a string.
    """
    if isinstance(words, str) or not isinstance(words, (Mapping, Sequence)) or not words:
        raise ConfigError(
            f"words={words!r:.60} must be a list or a dict with words for every class."
        )
    pairs = list(words.items()) if isinstance(words, Mapping) else list(enumerate(words))
    rows = [[row] if isinstance(row, str) else list(row) for _, row in pairs]
    bad = [n for n, row in enumerate(rows) if not all(isinstance(w, str) and w for w in row)]
    if bad:
        raise ConfigError(
            f"the words of class {bad[0]} are {rows[bad[0]]!r:.60}, but each word must be a "
            "non-empty string."
        )
    classes = [str(name) for name, _ in pairs]
    check_left(classes, rows, "the list")
    return classes, rows


def check_left(classes: Sequence[str], rows: Sequence[Sequence[str]], after: str) -> None:
    """Check that every class has label words after words were removed.

    Raises:
        ConfigError: a class has no label words.
    """
    empty = [name for name, row in zip(classes, rows, strict=True) if not row]
    if empty:
        raise ConfigError(
            f"after {after}, these classes have no label words: {', '.join(empty)}. Add more "
            "words to these classes."
        )


def check_shared(rows: Sequence[Sequence[str]]) -> None:
    """Check that each word belongs to one class.

    Raises:
        ConfigError: a word belongs to two classes.
    """
    owner: dict[str, int] = {}
    for number, row in enumerate(rows):
        for word in row:
            if owner.setdefault(word, number) != number:
                raise ConfigError(
                    f"the word {word!r} is in class {owner[word]} and in class {number}. Use each "
                    "word in one class only."
                )


def spell_word(word: str, tokenizer: Tokenizer) -> list[int]:
    """Tokenize a word with a leading space, unless it is Chinese or starts with "<!>".

    Many tokenizers distinguish words from word parts by the leading space.

    Raises:
        ConfigError: the tokenizer cannot encode the word.
    """
    bare = word.removeprefix("<!>") if word.startswith("<!>") else word.lstrip(" ")
    is_bare = word.startswith("<!>") or has_chinese(bare)
    ids = tokenizer.encode_plain([bare if is_bare else " " + bare])[0]
    if not ids or tokenizer.unk_id in ids:
        raise ConfigError(f"the tokenizer cannot encode the word {word!r}. Choose another word.")
    return ids
