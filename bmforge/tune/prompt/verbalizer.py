"""Label words: from scores of tokens at a mask to scores of classes.

All words of all classes share one softmax; a class's score is the mean, plain or weighted, of its
words' log-probabilities.

Sources: Schick and Schütze, "Exploiting cloze questions for few-shot text classification" (2021);
Zhao et al., "Calibrate before use" (2021); Hu et al., "Knowledgeable prompt-tuning" (2022).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.words import Words, check_left, check_shared, read_words, spell_word

__all__ = ["KnowledgeableVerbalizer", "ManualVerbalizer", "OneToOneVerbalizer", "PTRVerbalizer"]

Joining = Literal["first", "max", "mean", "joint"]
_JOININGS = ("first", "max", "mean", "joint")
# What a word that is not there scores, and what probabilities are kept from 0 by.
_ABSENT, _TINY = -10_000.0, 1e-15


class ManualVerbalizer(nn.Module):
    """Words chosen by hand, one or several a class, of one or several tokens.

    Args:
        words: of every class, in order; or class name -> words. A word begins with a blank, where
            the tokenizer tells words by it, unless it is Chinese or written with "<!>" in front.
        tokenizer: that of the model.
        join: a word of several tokens scores as its "first", the "max" or the "mean" of them at
            one mask; or "joint": its log-probability over as many masks or steps as it has tokens.
        normalize: return log-probabilities; off, the mean of the words' own scores.

    Attributes:
        takes: what it reads: "logits", scores of tokens at the mask; or "words", those of words.

    Shape:
        logits: (B, V), or of "joint" (B, number of all words) -> (B, C)

    Raises:
        ConfigError: no words, a word that cannot be spelled, or one that two classes share.
    """

    shares_words = False
    num_masks = 1

    def __init__(
        self, words: Words, tokenizer: Tokenizer, join: Joining = "first", normalize: bool = True
    ) -> None:
        super().__init__()
        if join not in _JOININGS:
            raise ConfigError(f"join={join!r} is unknown. Known: {', '.join(_JOININGS)}.")
        self.classes, self.words = read_words(words)
        self.join, self.normalize = join, normalize
        self.takes = "words" if join == "joint" else "logits"
        self.prior: Tensor | None = None
        if not self.shares_words:
            check_shared(self.words)
        self._spell(tokenizer)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.words)

    def _spell(self, tokenizer: Tokenizer) -> None:
        """Look the words' tokens up."""
        self._set_tokens([[spell_word(word, tokenizer) for word in row] for row in self.words])
        long = {
            word: [tokenizer.decode([id]) for id in ids]
            for row, tokens in zip(self.words, self.tokens, strict=True)
            for word, ids in zip(row, tokens, strict=True)
            if len(ids) > 1
        }
        if long and self.join == "first":
            get_logger().warning(
                "only the first token of these words is looked at: %s. Give join='joint' to score "
                "them whole",
                "; ".join(f"{word!r} = {' | '.join(ids)}" for word, ids in long.items()),
            )

    def _set_tokens(self, tokens: list[list[list[int]]]) -> None:
        """Take words by their tokens: `ids` (C, W, L), and which of them are there."""
        self.tokens = tokens
        width = max(map(len, tokens))
        length = max(len(ids) for row in tokens for ids in row)
        ids = torch.zeros(len(tokens), width, length, dtype=torch.long)
        there = torch.zeros(ids.shape, dtype=torch.bool)
        for number, row in enumerate(tokens):
            for place, word in enumerate(row):
                ids[number, place, : len(word)] = torch.tensor(word)
                there[number, place, : len(word)] = True
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("there", there, persistent=False)

    def answers(self, example: Any) -> list[list[int]]:
        """Return the tokens of all words, class after class: what "joint" asks a model for."""
        return [word for row in self.tokens for word in row]

    def project(self, logits: Tensor) -> Tensor:
        """Return the words' scores: (B, V) -> (B, C, W)."""
        there = self.there
        if self.join == "joint":
            scores = logits.new_full((len(logits), *there.shape[:2]), _ABSENT)
            scores[:, there[..., 0]] = logits
            return scores
        found = logits[:, self.ids]
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
            logits: (N, V), or as `forward` takes them

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

    Raises:
        ConfigError: as there; or join="joint", of whose words no vocabulary tells the rare ones.
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
        if options.get("join") == "joint":
            raise ConfigError(
                "join='joint' scores words, refinement tokens: give first, max or mean."
            )
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
        check_left(classes, kept, "refinement")
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
        check_left(self.classes, kept, f"calibration with drop_ratio={self.drop_ratio}")
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
        words: for every class, in order or by its name, one word for every mask.
        tokenizer: that of the model.
        per_mask: add the mean of the masks' own log-probabilities, with labels and without.

    Shape:
        logits: (B, M, V) -> (B, C)

    Source: Han et al., "PTR: prompt tuning with rules for text classification" (2021).
    """

    takes = "logits"
    normalize = True

    def __init__(
        self,
        words: Words,
        tokenizer: Tokenizer,
        per_mask: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.classes, self.words = read_words(words)
        if len({len(row) for row in self.words}) != 1:
            raise ConfigError("every class needs one word for each mask, all the same number.")
        if options.get("join") == "joint":
            raise ConfigError("join='joint' needs the masks for itself: give first, max or mean.")
        self.num_classes, self.per_mask = len(self.words), per_mask
        self.num_masks = len(self.words[0])
        self.tokens = [[spell_word(word, tokenizer) for word in row] for row in self.words]
        columns = list(zip(*self.words, strict=True))
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
