"""OpenPrompt's verbalizers, each of which wraps a bmforge verbalizer.

The bmforge verbalizer is built once the label words are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from bmforge.compat.openprompt.wrappers import wrap_tokenizer
from bmforge.errors import ConfigError
from bmforge.tune import prompt
from bmforge.tune.prompt.files import read_verbalizer

__all__ = [
    "AutomaticVerbalizer", "GenerationVerbalizer", "KnowledgeableVerbalizer", "ManualVerbalizer",
    "One2oneVerbalizer", "PTRVerbalizer", "ProtoVerbalizer", "SoftVerbalizer",
]  # fmt: skip


class ManualVerbalizer(nn.Module):
    """Verbalizer with label words chosen by the user.

    Args:
        tokenizer: tokenizer of bmforge or transformers.
        classes: class names.
        num_classes: number of classes, instead of names.
        label_words: words of each class, as a list or as a dict from class name to words; None if
            `from_file` reads them.
        prefix: text before a word: " " or "".
        multi_token_handler: "first", "max", "mean", or "joint" (not in OpenPrompt).
        post_log_softmax: True to return log-probabilities.
        options: options of subclasses.

    Attributes:
        core: the equivalent verbalizer of bmforge.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        label_words: Any = None,
        prefix: str = " ",
        multi_token_handler: str = "first",
        post_log_softmax: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if prefix not in ("", " "):
            raise ConfigError(f"prefix={prefix!r} must be ' ' or ''.")
        self.tokenizer, self.prefix = tokenizer, prefix
        self.classes = list(classes) if classes is not None else None
        self.num_classes = num_classes or (len(self.classes) if self.classes else None)
        self.join, self.normalize, self.options = multi_token_handler, post_log_softmax, options
        self.core: Any = None
        if label_words is not None:
            self.label_words = label_words

    @property
    def label_words(self) -> list[list[str]]:
        """Label words per class."""
        return list(self._need().words)

    @label_words.setter
    def label_words(self, words: Any) -> None:
        if isinstance(words, dict):
            names = self.classes or list(words)
            if set(names) != set(words):
                raise ConfigError(
                    f"label_words has the classes {list(words)}, but the verbalizer has "
                    f"{names}. Use the same classes."
                )
            words = [words[name] for name in names]
        rows = [[row] if isinstance(row, str) else list(row) for row in words]
        if self.num_classes not in (None, len(rows)):
            raise ConfigError(
                f"label_words has words for {len(rows)} classes, but there are {self.num_classes} "
                "classes. Define words for every class."
            )
        if not self.prefix:
            rows = [[w if w.startswith("<!>") else f"<!>{w}" for w in row] for row in rows]
        self.num_classes = len(rows)
        self.core = self._make(rows)

    @property
    def label_words_ids(self) -> Tensor:
        """Token ids of the label words, padded with 0: (C, W, L)."""
        ids: Tensor = self._need().ids
        return ids

    @property
    def words_ids_mask(self) -> Tensor:
        """1 for the tokens of label words, 0 for padding: (C, W, L)."""
        return self._need().there.long()  # type: ignore[no-any-return]

    @property
    def label_words_mask(self) -> Tensor:
        """1 for label words, 0 for padding: (C, W)."""
        return self.words_ids_mask.amax(-1)

    def _make(self, rows: list[list[str]]) -> nn.Module:
        """Build the bmforge verbalizer for label words; subclasses override this method."""
        tokenizer, join = wrap_tokenizer(self.tokenizer), self.join
        return prompt.ManualVerbalizer(rows, tokenizer, join, self.normalize)  # type: ignore[arg-type]

    def from_file(self, path: str, choice: int = 0) -> Self:
        """Read the label words from a file; return the verbalizer."""
        self.label_words = read_verbalizer(path, choice, self.classes or ())
        return self

    def _need(self) -> Any:
        if self.core is None:
            raise ConfigError(
                "the verbalizer has no words yet. Pass label_words=, or call from_file."
            )
        return self.core

    def register_calibrate_logits(self, logits: Tensor) -> None:
        """Calibrate the verbalizer with the word scores of content-free texts."""
        logits = logits if logits.dim() > 1 else logits[None]
        self._need().calibrate_(logits)

    def process_logits(self, logits: Tensor, **options: Any) -> Tensor:
        """Convert the logits at the mask to class scores."""
        scores: Tensor = self._need()(logits)
        return scores

    def forward(self, logits: Tensor) -> Tensor:
        """Convert the logits at the mask to class scores."""
        return self.process_logits(logits)


class KnowledgeableVerbalizer(ManualVerbalizer):
    """Verbalizer with many words per class.

    The options `max_token_split`, `candidate_frac` and `pred_temp` are those of OpenPrompt.
    """

    def _make(self, rows: list[list[str]]) -> nn.Module:
        options = self.options
        return prompt.KnowledgeableVerbalizer(
            rows, wrap_tokenizer(self.tokenizer), options.get("max_token_split", -1),
            options.get("candidate_frac", 0.5), options.get("pred_temp", 1.0),
            join=self.join, normalize=self.normalize,
        )  # fmt: skip


class One2oneVerbalizer(ManualVerbalizer):
    """Verbalizer with one word per class."""

    def _make(self, rows: list[list[str]]) -> nn.Module:
        options: Any = {"join": self.join, "normalize": self.normalize}
        return prompt.OneToOneVerbalizer(rows, wrap_tokenizer(self.tokenizer), **options)


class _GivenWords(ManualVerbalizer):
    """Base class of verbalizers whose `label_words` are the words as given, a list per class."""

    @property
    def label_words(self) -> list[list[str]]:
        """Label words per class."""
        return self._rows

    @label_words.setter
    def label_words(self, words: Any) -> None:
        ManualVerbalizer.label_words.fset(self, words)  # type: ignore[attr-defined]
        self._rows = [[row] if isinstance(row, str) else list(row) for row in words]


class _OfModel(ManualVerbalizer):
    """Base class of verbalizers whose second argument is the model, named `model` or `plm`."""

    def __init__(self, tokenizer: Any = None, model: Any = None, *arguments: Any, **options: Any):
        self._plm = [model if model is not None else options.pop("plm", None)]
        super().__init__(tokenizer, *arguments, **options)


class PTRVerbalizer(_GivenWords):
    """Verbalizer with one word per class at each of several masks."""

    def _make(self, rows: list[list[str]]) -> nn.Module:
        return prompt.PTRVerbalizer(rows, wrap_tokenizer(self.tokenizer), join=self.join)


class AutomaticVerbalizer(ManualVerbalizer):
    """Verbalizer that chooses its label words from labeled examples.

    Call `register_buffer(logits, labels)`, then `optimize_to_initialize()`.
    """

    def __init__(
        self, tokenizer: Any = None, num_candidates: int = 1000, label_word_num_per_class: int = 1,
        num_searches: int = 1, score_fct: str = "llr", balance: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        if num_searches != 1:
            raise ConfigError(f"num_searches={num_searches} is not supported (supported: 1).")
        options.pop("init_using_split", None)
        super().__init__(tokenizer, **options)
        if self.num_classes is None:
            raise ConfigError(
                "the number of classes of AutomaticVerbalizer is not set. Pass num_classes= or "
                "classes=."
            )
        self.core = prompt.AutomaticVerbalizer(
            self.num_classes, wrap_tokenizer(tokenizer), num_candidates=num_candidates,
            words_per_class=label_word_num_per_class, score=score_fct, balance=balance,
        )  # fmt: skip
        self._seen: list[tuple[Tensor, Tensor]] = []

    def register_buffer(self, *arguments: Any, **options: Any) -> None:
        """Store the labels of examples, and their logits at the mask positions.

        If the first argument is a name, call `torch.nn.Module.register_buffer`.
        """
        if arguments and isinstance(arguments[0], Tensor):
            self._seen.append((arguments[0].detach(), arguments[1]))
        else:
            super().register_buffer(*arguments, **options)

    def optimize_to_initialize(self) -> None:
        """Choose the label words from the stored logits."""
        if not self._seen:
            raise ConfigError(
                "no logits are stored, so no label words can be chosen. Call "
                "register_buffer(logits, labels) first."
            )
        logits, labels = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        self.core.fit_(logits, labels)
        self._seen = []


class SoftVerbalizer(_OfModel):
    """Verbalizer that scores classes with the model's head; its last layer has a row per class."""

    def __init__(self, tokenizer: Any = None, *arguments: Any, **options: Any) -> None:
        super().__init__(tokenizer, *arguments, **options)
        if self.core is None and self.num_classes:
            self.core = prompt.SoftVerbalizer(
                self.num_classes, wrap_tokenizer(tokenizer), self._plm[0]
            )

    def _make(self, rows: list[list[str]]) -> nn.Module:
        return prompt.SoftVerbalizer(rows, wrap_tokenizer(self.tokenizer), self._plm[0])

    @property
    def group_parameters_1(self) -> list[nn.Parameter]:
        """Parameters of the head, except its last layer."""
        return list(self._need().head.parameters())

    @property
    def group_parameters_2(self) -> list[nn.Parameter]:
        """Weight rows of the classes (the last layer of the head)."""
        return [self._need().rows]


class ProtoVerbalizer(_OfModel, _GivenWords):
    """Verbalizer with label words and trained class prototypes."""

    def _make(self, rows: list[list[str]]) -> nn.Module:
        words = None
        if self.options.get("multi_verb", "multi") == "multi":
            words = prompt.ManualVerbalizer(rows, wrap_tokenizer(self.tokenizer), self.join)  # type: ignore[arg-type]
        width = self._plm[0].config.hidden_size
        return prompt.PrototypeVerbalizer(len(rows), width, self.options.get("mid_dim", 64), words)

    def train_proto(self, model: Any, dataloader: Any, device: Any = None) -> None:
        """Train the class prototypes on a loader's labeled examples."""
        states, labels = [], []
        for batch in dataloader:
            answers = model.look(batch)
            states.append(answers.hidden)
            labels.append(batch["label"])
        options = {"epochs": self.options.get("epochs", 5), "lr": self.options.get("lr", 1e-3)}
        self._need().fit_(torch.cat(states), torch.cat(labels), **options)


class GenerationVerbalizer(ManualVerbalizer):
    """Verbalizer whose classes are texts to generate: label words or, with `is_rule`, templates."""

    def _make(self, rows: list[list[str]]) -> nn.Module:
        rule = bool(self.options.get("is_rule", False))
        return prompt.GenerationVerbalizer(rows, wrap_tokenizer(self.tokenizer), rule=rule)

    def wrap_one_example(self, example: Any) -> Any:
        """Set the target of an example to the text of its class; return the example."""
        example.tgt_text = self._need().write(example, example.label)
        return example
