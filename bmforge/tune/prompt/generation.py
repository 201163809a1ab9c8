"""Verbalizer for classes that are texts of several words, which may depend on the example."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.language import parse_template
from bmforge.tune.prompt.template import fill_piece, read_fields
from bmforge.tune.prompt.words import Words, read_words

__all__ = ["GenerationVerbalizer"]


class GenerationVerbalizer(nn.Module):
    """Verbalizer that scores a class by the log-probability of its text at the mask.

    In training, the text of the correct class is the target.

    Args:
        words: text of every class, in order; if a class has several texts, the first is used.
        tokenizer: the model's tokenizer.
        rule: True if the texts are templates without a mask that are filled from each example, such
            as `{"meta":"choice1"}`.
        per_token: True to divide by the number of tokens, so that long texts are not penalized.

    Shape:
        scores: (B, C), scores of the texts -> (B, C)

    Raises:
        ConfigError: there are no texts, or a text is not a valid template.
    """

    takes = "words"
    num_masks = 1

    def __init__(
        self, words: Words, tokenizer: Tokenizer, rule: bool = False, per_token: bool = False
    ) -> None:
        super().__init__()
        self.classes, rows = read_words(words)
        self.words = [row[:1] for row in rows]
        self.normalize, self.per_token = False, per_token
        self._tokenizer = tokenizer
        self._rules = [parse_template(row[0], needs_mask=False) for row in rows] if rule else None
        kinds = {p.kind for rule in self._rules or () for p in rule}
        if kinds & {"mask", "soft", "special"}:
            raise ConfigError(
                'the text of a class must not contain {"mask"}, {"soft"} or {"special"}, because '
                "the model generates it."
            )

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.words)

    def write(self, example: Any, label: int) -> str:
        """Return the text of a class for an example, the training target of a `PromptGenerator`."""
        if self._rules is None:
            return self.words[label][0]
        fields, meta = read_fields(example)
        text = ""
        for piece in self._rules[label]:
            text += " " * piece.spaced + fill_piece(piece, fields, meta)
        return text

    def answers(self, example: Any) -> list[list[int]]:
        """Return the token ids of each class's text.

        Raises:
            ConfigError: a text has no tokens.
        """
        texts = [self.write(example, label) for label in range(self.num_classes)]
        tokens = self._tokenizer.encode_plain(texts)
        if not all(tokens):
            raise ConfigError(
                f"the tokenizer encodes the text {texts[tokens.index([])]!r} of class "
                f"{tokens.index([])} to no tokens. Use another text."
            )
        return tokens

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores unchanged, since the score of a class is that of its text."""
        return scores
