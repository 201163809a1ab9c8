"""Label words: from scores of tokens at a mask to scores of classes.

All words of all classes share one softmax; a class's score is the mean, plain or weighted, of its
words' log-probabilities.

Sources: Schick and Schütze, "Exploiting cloze questions for few-shot text classification" (2021);
Zhao et al., "Calibrate before use" (2021); Hu et al., "Knowledgeable prompt-tuning" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer

__all__ = ["KnowledgeableVerbalizer", "ManualVerbalizer", "OneToOneVerbalizer", "PTRVerbalizer"]

Words = Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]]
Joining = Literal["first", "max", "mean"]
# What a word that is not there scores, and what probabilities are kept from 0 by.
_ABSENT, _TINY = -10_000.0, 1e-15


class ManualVerbalizer(nn.Module):
    """Words chosen by hand, one or several a class, of one or several tokens.

    Args:
        words: of every class, in order; or class name -> words. A word begins with a blank, where
            the tokenizer tells words by it, unless it is written with "<!>" in front.
        tokenizer: that of the model.
        join: a word of several tokens scores as its "first", the "max" or the "mean" of them.
        normalize: return log-probabilities; off, the mean of the words' own scores.

    Shape:
        logits: (B, V) -> (B, C)

    Raises:
        ConfigError: no words, a word that cannot be spelled, or one that two classes share.
    """

    shares_words = False
    takes = "logits"
    num_masks = 1

    def __init__(
        self, words: Words, tokenizer: Tokenizer, join: Joining = "first", normalize: bool = True
    ) -> None:
        super().__init__()
        if join not in ("first", "max", "mean"):
            raise ConfigError(f"join={join!r} is unknown. Known: first, max, mean.")
        self.classes, self.words = read_words(words)
        self.join, self.normalize = join, normalize
        self.prior: Tensor | None = None
        if not self.shares_words:
            check_shared(self.words)
        self._spell(tokenizer)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.words)

    def _spell(self, tokenizer: Tokenizer) -> None:
        """Look the words' tokens up: `ids` (C, W, L), and which of them are there."""
        self.tokens = [[spell_word(word, tokenizer) for word in row] for row in self.words]
        width = max(map(len, self.tokens))
        length = max(len(ids) for row in self.tokens for ids in row)
        ids = torch.zeros(len(self.tokens), width, length, dtype=torch.long)
        there = torch.zeros(ids.shape, dtype=torch.bool)
        for number, row in enumerate(self.tokens):
            for place, word in enumerate(row):
                ids[number, place, : len(word)] = torch.tensor(word)
                there[number, place, : len(word)] = True
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("there", there, persistent=False)

    def project(self, logits: Tensor) -> Tensor:
        """Return the words' scores: (B, V) -> (B, C, W)."""
        found, there = logits[:, self.ids], self.there
        if self.join == "first":
            scores = found[..., 0]
        elif self.join == "max":
            scores = found.masked_fill(~there, _ABSENT).amax(-1)
        else:
            scores = (found * there).sum(-1) / there.sum(-1).clamp(min=1)
        return scores.masked_fill(~there[..., 0], _ABSENT)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the classes' log-probabilities."""
        words = self.project(logits)
        if self.normalize:
            chances = words.flatten(1).softmax(-1)
            if self.prior is not None:
                prior = self.project(self.prior[None].to(logits)).flatten(1).softmax(-1)
                chances = chances / (prior + _TINY)
                chances = chances / chances.sum(-1, keepdim=True)
            words = (chances + _TINY).log().view_as(words)
        return self.gather(words)

    def gather(self, words: Tensor) -> Tensor:
        """Return a class's score of those of its words: (B, C, W) -> (B, C)."""
        there = self.there[..., 0]
        return (words * there).sum(-1) / there.sum(-1)

    def calibrate_(self, logits: Tensor | None) -> None:
        """Divide by how likely the words are anyway.

        Args:
            logits: of texts that say nothing of a class; their mean is taken. None undoes it.

        Shape:
            logits: (N, V)

        Raises:
            ConfigError: there are none.
        """
        if logits is not None and not len(logits):
            raise ConfigError("calibration needs at least one text; the support set is empty.")
        self.prior = None if logits is None else logits.detach().float().mean(0)


class KnowledgeableVerbalizer(ManualVerbalizer):
    """Many words a class, as a knowledge base gives them; refined, and weighed by training.

    Args:
        words: as of a `ManualVerbalizer`; one that classes share stays with the class that has it
            first among its own, and goes from the others.
        tokenizer: that of the model.
        max_tokens: words of more are left out; -1 keeps all.
        drop_ratio: part of the vocabulary, the least likely, whose words calibration removes.
        temperature: factor on the weights when it does not train.
        options: further ones of a `ManualVerbalizer`.
    """

    shares_words = True

    def __init__(
        self,
        words: Words,
        tokenizer: Tokenizer,
        max_tokens: int = -1,
        drop_ratio: float = 0.5,
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        classes, rows = read_words(words)
        firsts = {row[0] for row in rows}
        counts = {word: sum(word in row for row in rows) for row in rows for word in row}
        kept = [
            [
                word
                for place, word in enumerate(row)
                if (counts[word] < 2 or (place == 0 and word in firsts))
                and (max_tokens < 0 or len(spell_word(word, tokenizer)) <= max_tokens)
            ]
            for row in rows
        ]
        _check_left(classes, kept, "refinement")
        self.drop_ratio, self.temperature = drop_ratio, temperature
        super().__init__(dict(zip(classes, kept, strict=True)), tokenizer, **options)
        self._tokenizer = tokenizer
        self.weights = nn.Parameter(torch.zeros(self.there.shape[:2]))

    def gather(self, words: Tensor) -> Tensor:
        """Weigh the words, by a softmax of trained weights."""
        there = self.there[..., 0]
        weights = self.weights * (1.0 if self.training else self.temperature)
        return (words * there * weights.masked_fill(~there, _ABSENT).softmax(-1)).sum(-1)

    def calibrate_(self, logits: Tensor | None) -> None:
        """Calibrate, and remove the words that are hardly ever said; weights begin anew.

        Raises:
            ConfigError: a class would lose all of its words; nothing is changed then.
        """
        if logits is None:
            return super().calibrate_(None)
        if not len(logits):
            raise ConfigError("calibration needs at least one text; the support set is empty.")
        prior = logits.detach().float().mean(0)
        rare = set(prior.topk(int(self.drop_ratio * len(prior)), largest=False).indices.tolist())
        kept = [
            [word for word, ids in zip(row, tokens, strict=True) if not rare & set(ids)]
            for row, tokens in zip(self.words, self.tokens, strict=True)
        ]
        _check_left(self.classes, kept, f"calibration with drop_ratio={self.drop_ratio}")
        self.words = kept
        self._spell(self._tokenizer)
        self.to(logits.device)
        self.weights = nn.Parameter(torch.zeros(self.there.shape[:2], device=logits.device))
        return super().calibrate_(logits)


class OneToOneVerbalizer(ManualVerbalizer):
    """One word a class.

    Raises:
        ConfigError: a class with several words.
    """

    def __init__(self, words: Words, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(words, tokenizer, **options)
        many = [name for name, row in zip(self.classes, self.words, strict=True) if len(row) > 1]
        if many:
            raise ConfigError(f"these classes have several words: {', '.join(many)}. Give one.")


class PTRVerbalizer(nn.Module):
    """Classes told by a word at each of several masks.

    Args:
        words: for every class one word for every mask.
        tokenizer: that of the model.
        per_mask: add the mean of the masks' own log-probabilities, with labels and without.

    Shape:
        logits: (B, M, V) -> (B, C)

    Source: Han et al., "PTR: prompt tuning with rules for text classification" (2021).
    """

    takes = "logits"

    def __init__(
        self,
        words: Sequence[Sequence[str]],
        tokenizer: Tokenizer,
        per_mask: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if len({len(row) for row in words}) != 1:
            raise ConfigError("every class needs one word for each mask, all the same number.")
        self.num_masks, self.num_classes, self.per_mask = len(words[0]), len(words), per_mask
        columns = list(zip(*words, strict=True))
        unique = [list(dict.fromkeys(column)) for column in columns]
        self.masks = nn.ModuleList(
            OneToOneVerbalizer(column, tokenizer, normalize=False, **options) for column in unique
        )
        places = [[row.index(w) for w in col] for row, col in zip(unique, columns, strict=True)]
        self.register_buffer("places", torch.tensor(places), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the classes' log-probabilities."""
        each = [mask(logits[:, n]) for n, mask in enumerate(self.masks)]
        parts = [one[:, places] for one, places in zip(each, self.places, strict=True)]
        total = F.log_softmax(torch.stack(parts).sum(0), -1)
        if self.per_mask:
            own = [F.log_softmax(o, -1)[:, p] for o, p in zip(each, self.places, strict=True)]
            total = total + torch.stack(own).mean(0)
        return total


def read_words(words: Words) -> tuple[list[str], list[list[str]]]:
    """Return the classes' names and their words.

    Raises:
        ConfigError: a class without words, or something that is no word.
    """
    if isinstance(words, str) or not isinstance(words, (Mapping, Sequence)) or not words:
        raise ConfigError(f"words={words!r:.60} must be a list with words for every class.")
    pairs = list(words.items()) if isinstance(words, Mapping) else list(enumerate(words))
    rows = [[row] if isinstance(row, str) else list(row) for _, row in pairs]
    bad = [n for n, row in enumerate(rows) if not all(isinstance(w, str) and w for w in row)]
    if bad:
        raise ConfigError(f"class {bad[0]} has {rows[bad[0]]!r:.60}: words are texts, not empty.")
    classes = [str(name) for name, _ in pairs]
    _check_left(classes, rows, "the list")
    return classes, rows


def _check_left(classes: Sequence[str], rows: Sequence[Sequence[str]], after: str) -> None:
    empty = [name for name, row in zip(classes, rows, strict=True) if not row]
    if empty:
        raise ConfigError(
            f"after {after} these classes have no words: {', '.join(empty)}. Give them more."
        )


def check_shared(rows: Sequence[Sequence[str]]) -> None:
    """Refuse a word of two classes.

    Raises:
        ConfigError: there is one.
    """
    owner: dict[str, int] = {}
    for number, row in enumerate(rows):
        for word in row:
            if owner.setdefault(word, number) != number:
                raise ConfigError(
                    f"the word {word!r} is of class {owner[word]} and of class {number}: it tells "
                    "neither. Give each its own."
                )


def spell_word(word: str, tokenizer: Tokenizer) -> list[int]:
    """Return a word's tokens.

    Raises:
        ConfigError: the tokenizer cannot spell it.
    """
    text = word.removeprefix("<!>") if word.startswith("<!>") else " " + word.lstrip(" ")
    ids = tokenizer.encode_plain([text])[0]
    if not ids or tokenizer.unk_id in ids:
        raise ConfigError(f"the tokenizer cannot spell the word {word!r}: choose another.")
    return ids
