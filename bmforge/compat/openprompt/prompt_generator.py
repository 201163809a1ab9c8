"""OpenPrompt's search for templates and label words (LM-BFF), implemented with bmforge's search.

Source: Gao et al., "Making pre-trained language models better few-shot learners" (2021).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.compat.openprompt.models import PromptModel
from bmforge.compat.openprompt.templates import ManualTemplate
from bmforge.compat.openprompt.wrappers import wrap_tokenizer
from bmforge.errors import ConfigError
from bmforge.surgery import eval_mode
from bmforge.tune.prompt.search_template import search_templates
from bmforge.tune.prompt.search_words import search_label_words

__all__ = [
    "LMBFFTemplateGenerationTemplate", "RobertaVerbalizerGenerator", "T5TemplateGenerator",
    "TemplateGenerator", "VerbalizerGenerator",
]  # fmt: skip

_MASK = re.compile(r'\{\s*"mask"\s*(:[^{}]*)?\}')
_LABEL_WORD = re.compile(r'\{\s*"meta"\s*:\s*"labelword"\s*\}')


class LMBFFTemplateGenerationTemplate(ManualTemplate):
    """Template with a label word, `{"meta":"labelword"}`, and masks for the texts to generate.

    Args:
        tokenizer: tokenizer of the model that generates.
        verbalizer: verbalizer; the first word of an example's class is its label word.
        text: template text with two masks.
        options: further arguments of OpenPrompt's class; accepted and ignored.
    """

    def __init__(
        self, tokenizer: Any, verbalizer: Any, text: str | None = None, **options: Any
    ) -> None:
        super().__init__(tokenizer, text, **options)
        self.verbalizer = verbalizer

    def fill(self, example: Any) -> Any:
        """Set the label word of an example; return the example."""
        word = self.verbalizer.label_words[example.label][0]
        example.meta["labelword"] = word.removeprefix("<!>").strip()
        return example


class _Generator:
    """Base class of the searches, with the model that scores the candidates."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def release_memory(self) -> None:
        """Move the model to the CPU."""
        self.model.cpu()


class TemplateGenerator(_Generator):
    """Searches for the most probable texts at two masks, over all registered examples.

    Args:
        model: encoder-decoder trained on span corruption.
        tokenizer: the model's tokenizer.
        tokenizer_wrapper: accepted and ignored, because the template determines the prompt format.
        verbalizer: verbalizer with the label words.
        max_length: maximum length of a template in tokens.
        target_number: number of generated parts; must be 2.
        beam_width: beam width, and the number of templates returned.

    Raises:
        ConfigError: `target_number` is not 2.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tokenizer_wrapper: Any = None,
        verbalizer: Any = None,
        max_length: int = 20,
        target_number: int = 2,
        beam_width: int = 100,
    ) -> None:
        if target_number != 2:
            raise ConfigError(
                f"target_number={target_number} is not supported (supported: 2). Set "
                "target_number=2."
            )
        super().__init__(model, tokenizer)
        self.verbalizer = verbalizer
        self.max_length, self.beam_width = max_length, beam_width
        self._examples: list[Any] = []

    def _register_buffer(self, batch: Mapping[str, Any]) -> None:
        """Register the examples of a batch for the search."""
        self._examples += batch["examples"]

    def _get_templates(self) -> list[tuple[str, str]]:
        """Return pairs of texts for the first and the second mask, the most probable pair first."""
        words = [
            self.verbalizer.label_words[example.label][0].removeprefix("<!>").strip()
            for example in self._examples
        ]
        with eval_mode(self.model):
            ranked = search_templates(
                self.model, wrap_tokenizer(self.tokenizer), self._examples, words,
                beams=self.beam_width, keep=self.beam_width, max_tokens=self.max_length,
            )  # fmt: skip
        parts = [
            re.split(_MASK, text.removeprefix('{"placeholder":"text_a"}')) for text, _ in ranked
        ]
        return [(part[0].strip(), part[-1].strip()) for part in parts]

    def convert_template(self, generated: tuple[str, str], original: str) -> str:
        """Return a template with the generated texts, and a mask instead of the label word."""
        texts = iter(generated)
        filled = _MASK.sub(lambda _: next(texts), original, count=2)
        return _LABEL_WORD.sub('{"mask"}', filled)


T5TemplateGenerator = TemplateGenerator  # OpenPrompt's subclass for T5, the only kind of model


class VerbalizerGenerator(_Generator):
    """Searches for sets of one label word per class with the best zero-shot accuracy.

    Args:
        model: masked language model.
        tokenizer: the model's tokenizer.
        candidate_num: number of sets returned.
        label_word_num_per_class: number of candidate words per class.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        candidate_num: int = 100,
        label_word_num_per_class: int = 100,
    ) -> None:
        super().__init__(model, tokenizer)
        self.candidate_num = candidate_num
        self.label_word_num_per_class = label_word_num_per_class
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    @torch.no_grad()
    def register_buffer(self, batch: Any) -> None:
        """Store the labels of a batch of examples, and their logits at the mask positions."""
        with eval_mode(self.model):
            answers = PromptModel(self.model, torch.nn.Identity()).look(batch, hidden=False)
        self._logits.append(answers.logits[:, 0])
        self._labels.append(batch["label"])

    def is_label_word(self, token: str) -> bool:
        """Return True if a vocabulary token can be a label word."""
        return True

    def generate(self) -> list[list[str]]:
        """Return sets of label words, the most accurate first."""
        vocabulary = wrap_tokenizer(self.tokenizer).get_vocab()
        logits = torch.cat(self._logits).float()
        allowed = [id for token, id in vocabulary.items() if self.is_label_word(token)]
        # A token such as a single space has no text that could be a label word.
        allowed = [id for id in allowed if self._words([id])[0]]
        masked = torch.full_like(logits, -torch.inf)
        masked[:, allowed] = logits[:, allowed]
        count = min(self.label_word_num_per_class, len(allowed))
        ranked = search_label_words(
            masked, torch.cat(self._labels), num_candidates=count, keep=self.candidate_num
        )
        return [self._words(ids) for ids, _ in ranked]

    def _words(self, ids: Sequence[int]) -> list[str]:
        tokenizer = wrap_tokenizer(self.tokenizer)
        return [tokenizer.decode([id]).strip() for id in ids]


class RobertaVerbalizerGenerator(VerbalizerGenerator):
    """`VerbalizerGenerator` for byte-level vocabularies, whose words begin with a space."""

    def is_label_word(self, token: str) -> bool:
        """Return True if a token begins with a space, which byte-level BPE writes as `Ġ`."""
        return token.startswith("\u0120")
