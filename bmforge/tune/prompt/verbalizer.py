"""Verbalizers: map token scores at a mask to class scores, using label words.

All words of all classes share one softmax; a class's score is the mean, weighted or not, of its
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
# Score of padding words, and the minimum probability.
_ABSENT, _TINY = -10_000.0, 1e-15


class ManualVerbalizer(nn.Module):
    """Verbalizer with label words chosen by the user, one or several per class.

    Args:
        words: words of every class, in order; or a dict from class name to words. A space is added
            before a word unless it is Chinese or starts with "<!>".
        tokenizer: the model's tokenizer.
        join: score of a word with several tokens: "first" is the first token's score at one mask,
            "max" and "mean" those of all tokens at one mask, and "joint" the word's log-probability
            over as many masks or decoding steps as it has tokens.
        normalize: True to return log-probabilities; False to return the mean of the words' raw
            scores.

    Attributes:
        takes: input of the verbalizer: "logits" (token scores at the mask) or "words" (word
            scores).

    Shape:
        logits: (B, V), or for "joint" (B, number of all words) -> (B, C)

    Raises:
        ConfigError: there are no words, the tokenizer cannot encode a word, or two classes share a
            word.
    """

    shares_words = False
    num_masks = 1

    def __init__(
        self, words: Words, tokenizer: Tokenizer, join: Joining = "first", normalize: bool = True
    ) -> None:
        super().__init__()
        if join not in _JOININGS:
            raise ConfigError(f"unknown method: join={join!r} (supported: {', '.join(_JOININGS)}).")
        self.classes, self.words = read_words(words)
        self.join, self.normalize = join, normalize
        self.takes = "words" if join == "joint" else "logits"
        self.prior: Tensor | None = None
        if not self.shares_words:
            check_shared(self.words)
        self._spell(tokenizer)

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.words)

    def _spell(self, tokenizer: Tokenizer) -> None:
        """Tokenize the label words."""
        self._set_tokens([[spell_word(word, tokenizer) for word in row] for row in self.words])
        long = {
            word: [tokenizer.decode([id]) for id in ids]
            for row, tokens in zip(self.words, self.tokens, strict=True)
            for word, ids in zip(row, tokens, strict=True)
            if len(ids) > 1
        }
        if long and self.join == "first":
            get_logger().warning(
                (
                    "only the first token of these words is scored: %s. Pass join='joint' to "
                    "score whole words."
                ),
                "; ".join(f"{word!r} = {' | '.join(ids)}" for word, ids in long.items()),
            )

    def _set_tokens(self, tokens: list[list[list[int]]]) -> None:
        """Store the tokens of the words as `ids` (C, W, L), with a mask of the valid entries."""
        self.tokens = tokens
        width = max(map(len, tokens))
        length = max(len(ids) for row in tokens for ids in row)
        ids = torch.zeros(len(tokens), width, length, dtype=torch.long)
        is_valid = torch.zeros(ids.shape, dtype=torch.bool)
        for number, row in enumerate(tokens):
            for index, word in enumerate(row):
                ids[number, index, : len(word)] = torch.tensor(word)
                is_valid[number, index, : len(word)] = True
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("there", is_valid, persistent=False)

    def answers(self, example: Any) -> list[list[int]]:
        """Return the token ids of all label words, class by class."""
        return [word for row in self.tokens for word in row]

    def project(self, logits: Tensor) -> Tensor:
        """Compute the scores of the label words from token scores: (B, V) -> (B, C, W)."""
        is_valid = self.there
        if self.join == "joint":
            scores = logits.new_full((len(logits), *is_valid.shape[:2]), _ABSENT)
            scores[:, is_valid[..., 0]] = logits
            return scores
        gathered = logits[:, self.ids]
        if self.join == "first":
            scores = gathered[..., 0]
        elif self.join == "max":
            scores = gathered.masked_fill(~is_valid, _ABSENT).amax(-1)
        else:
            scores = (gathered * is_valid).sum(-1) / is_valid.sum(-1).clamp(min=1)
        return scores.masked_fill(~is_valid[..., 0], _ABSENT)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the classes."""
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
        """Average the scores of each class's words: (B, C, W) -> (B, C)."""
        is_valid = self.there[..., 0]
        return (words * is_valid).sum(-1) / is_valid.sum(-1)

    def calibrate_(self, logits: Tensor | None) -> None:
        """Set the words' prior probabilities, by which later word probabilities are divided.

        Args:
            logits: logits on content-free texts, which are averaged; None to remove the
                calibration.

        Shape:
            logits: (N, V), or the input shape of `forward`

        Raises:
            ConfigError: there are no content-free texts.
        """
        if logits is not None and not len(logits):
            raise ConfigError("calibration needs at least one text. Pass texts.")
        self.prior = None if logits is None else logits.detach().float().mean(0)


class KnowledgeableVerbalizer(ManualVerbalizer):
    """Verbalizer with many words per class, refined by calibration and trained weights.

    Args:
        words: words of every class, as in `ManualVerbalizer`; a word shared by classes is kept only
            for the class that lists it earliest.
        tokenizer: the model's tokenizer.
        max_tokens: maximum length of a word in tokens; longer words are removed; -1 for no limit.
        drop_ratio: calibration removes label words that are among this fraction of the vocabulary's
            least probable tokens.
        temperature: factor on the weights in evaluation mode.
        options: further options of `ManualVerbalizer`.

    Raises:
        ConfigError: `join` is "joint", for which there are no vocabulary scores to find rare words;
            also for the reasons given in `ManualVerbalizer`.
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
                "join='joint' is not supported by KnowledgeableVerbalizer (supported: first, max, "
                "mean). Use one of these."
            )
        classes, rows = read_words(words)
        firsts = {row[0] for row in rows}
        counts = {word: sum(word in row for row in rows) for row in rows for word in row}
        frequent = [
            [
                word
                for index, word in enumerate(row)
                if (counts[word] < 2 or (index == 0 and word in firsts))
                and (max_tokens < 0 or len(spell_word(word, tokenizer)) <= max_tokens)
            ]
            for row in rows
        ]
        check_left(classes, frequent, "refinement")
        self.drop_ratio, self.temperature = drop_ratio, temperature
        super().__init__(dict(zip(classes, frequent, strict=True)), tokenizer, **options)
        self._tokenizer = tokenizer
        self.weights = nn.Parameter(torch.zeros(self.there.shape[:2]))

    def gather(self, words: Tensor) -> Tensor:
        """Average the scores of each class's words, weighted by a softmax of trained weights."""
        is_valid = self.there[..., 0]
        weights = self.weights * (1.0 if self.training else self.temperature)
        return (words * is_valid * weights.masked_fill(~is_valid, _ABSENT).softmax(-1)).sum(-1)

    def calibrate_(self, logits: Tensor | None) -> None:
        """Calibrate, remove the least probable words, and reset the trained weights.

        Raises:
            ConfigError: a class would lose all of its words; nothing is changed in this case.
        """
        if logits is None:
            return super().calibrate_(None)
        if not len(logits):
            raise ConfigError("calibration needs at least one text. Pass texts.")
        prior = logits.detach().float().mean(0)
        rare = set(prior.topk(int(self.drop_ratio * len(prior)), largest=False).indices.tolist())
        remaining = [
            [word for word, ids in zip(row, tokens, strict=True) if not rare & set(ids)]
            for row, tokens in zip(self.words, self.tokens, strict=True)
        ]
        check_left(self.classes, remaining, f"calibration with drop_ratio={self.drop_ratio}")
        self.words = remaining
        self._spell(self._tokenizer)
        self.to(logits.device)
        self.weights = nn.Parameter(torch.zeros(self.there.shape[:2], device=logits.device))
        return super().calibrate_(logits)


class OneToOneVerbalizer(ManualVerbalizer):
    """Verbalizer with exactly one word per class.

    Raises:
        ConfigError: a class has several words.
    """

    def __init__(self, words: Words, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(words, tokenizer, **options)
        many = [name for name, row in zip(self.classes, self.words, strict=True) if len(row) > 1]
        if many:
            raise ConfigError(
                f"these classes have several words: {', '.join(many)}. Use one word per class."
            )


class PTRVerbalizer(nn.Module):
    """Verbalizer for several masks, whose classes are defined by one word at each mask.

    Args:
        words: one word per mask for every class, as a list in class order or a dict from class name
            to words.
        tokenizer: the model's tokenizer.
        per_mask: True to add the mean of the log-probabilities at the individual masks, in training
            and evaluation.

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
            raise ConfigError(
                "every class needs the same number of words, one per mask. Change the label "
                "words so that all classes have equally many."
            )
        if options.get("join") == "joint":
            raise ConfigError(
                "join='joint' is not supported with several masks (supported: first, max, mean)."
            )
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
        """Return the log-probabilities of the classes."""
        each = [mask(logits[:, n]) for n, mask in enumerate(self.masks)]
        parts = [scores[:, places] for scores, places in zip(each, self.places, strict=True)]
        total = F.log_softmax(torch.stack(parts).sum(0), -1)
        if self.per_mask:
            own = [F.log_softmax(o, -1)[:, p] for o, p in zip(each, self.places, strict=True)]
            total = total + torch.stack(own).mean(0)
        return total
