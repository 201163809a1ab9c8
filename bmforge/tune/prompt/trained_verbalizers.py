"""Trained verbalizers: a head with one output vector per class (WARP), and class prototypes.

Both read the last hidden states at the mask, not token scores.
Sources: Hambardzumyan et al., "WARP: word-level adversarial reprogramming" (2021); Cui et al.,
"Prototypical verbalizer for prompt-based few-shot tuning" (2022).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.verbalizer import ManualVerbalizer
from bmforge.tune.prompt.words import Words, read_words, spell_word

__all__ = ["PrototypeVerbalizer", "SoftVerbalizer"]


class SoftVerbalizer(nn.Module):
    """Verbalizer with one trained output row per class, initialized from its label word (WARP).

    Args:
        words: label words of every class, in order, or the number of classes. A class's row is
            initialized with the mean output row of its first word's tokens; without words, as in
            `nn.Linear`.
        tokenizer: the model's tokenizer.
        model: model whose head is copied; not yet parallelized.

    Attributes:
        head: trained copy of the head without its last layer.
        rows: trained output rows, (C, D).

    Shape:
        hidden: (B, D) -> (B, C)

    Raises:
        ConfigError: the model has no LM head, or is parallelized.
    """

    takes = "hidden"
    normalize = False
    num_masks = 1

    def __init__(self, words: Words | int, tokenizer: Tokenizer, model: Any) -> None:
        super().__init__()
        self.head, weight, self.scale = copy_head(model)
        if isinstance(words, int):
            self.classes, self.words = read_words([[str(number)] for number in range(words)])
            rows = nn.Linear(weight.shape[1], words, bias=False).weight.detach().to(weight)
        else:
            self.classes, self.words = read_words(words)
            means = [weight[spell_word(row[0], tokenizer)].mean(0) for row in self.words]
            rows = torch.stack(means)
        self.rows = nn.Parameter(rows.clone())

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.rows)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the class scores."""
        return F.linear(self.head(hidden * self.scale), self.rows)


def copy_head(model: Any) -> tuple[nn.Module, Tensor, float]:
    """Return a copy of a head without its last layer, the last layer's weight, and a logit scale.

    Args:
        model: bmforge or transformers model.

    Raises:
        ConfigError: the model has no LM head, or is parallelized.
    """
    last, module = _find_last(model)
    weight = last.matrix(torch.float32) if hasattr(last, "matrix") else last.weight
    if isinstance(weight, DTensor):
        raise ConfigError(
            "the model is already parallelized. Build the verbalizer before parallelize()."
        )
    # The last layer is not copied: it is often larger than the rest of the head.
    head = nn.Identity() if module is last else copy.deepcopy(module, {id(last): nn.Identity()})
    scale = getattr(getattr(model, "spec", None), "head_scale", 1.0)
    return head.requires_grad_(True), weight.detach(), scale


def _find_last(model: Any) -> tuple[Any, Any]:
    """Return the last linear layer of a model's output head, and the module that contains it."""
    masked = getattr(model, "mlm_head", None)
    if masked is not None:
        return masked.decoder, masked
    head = getattr(model, "lm_head", None) if hasattr(model, "traits") else None
    if head is not None:
        return head, head
    find = getattr(model, "get_output_embeddings", lambda: None)
    last = find()
    for child in model.children():
        if last is not None and any(module is last for module in child.modules()):
            return last, child
    raise ConfigError(
        f"{type(model).__name__} has no head that predicts tokens. Load it with a "
        "language-model head."
    )


class PrototypeVerbalizer(nn.Module):
    """Verbalizer that scores classes by similarity to trained prototypes in a small space.

    Args:
        num_classes: number of classes, C.
        width: hidden size of the model, D.
        size: dimension of the prototype space.
        words: verbalizer whose scores are averaged with the prototypes' scores, both standardized
            to mean 0 and standard deviation 1; if None, only the prototypes' scores are used.
        seed: random seed of the initialization.

    Shape:
        hidden: (B, D), and with `words` logits: (B, V) -> (B, C)
    """

    normalize = False
    num_masks = 1

    def __init__(
        self,
        num_classes: int,
        width: int,
        size: int = 64,
        words: ManualVerbalizer | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if words is not None and (words.num_classes != num_classes or words.takes != "logits"):
            raise ConfigError(
                f"words is a verbalizer of {words.num_classes} classes that uses {words.takes} "
                f"(expected: {num_classes} classes, and a verbalizer that uses the tokens at the "
                "mask)."
            )
        if words is not None and num_classes < 2:
            raise ConfigError(
                f"num_classes={num_classes} is too small (allowed: at least 2 if words is "
                "given). Pass a larger num_classes."
            )
        self.num_classes, self.words = num_classes, words
        self.takes = "hidden" if words is None else "both"
        generator = torch.Generator().manual_seed(seed)
        self.project = nn.Linear(width, size, bias=False)
        self.points = nn.Parameter(torch.empty(num_classes, size))
        with torch.no_grad():
            bound = width**-0.5
            self.project.weight.uniform_(-bound, bound, generator=generator)
            bound = (6 / (num_classes + size)) ** 0.5
            self.points.uniform_(-bound, bound, generator=generator)

    def forward(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:
        """Return the class scores."""
        similarity = _compare(self.project(hidden), self.points)
        if self.words is None:
            return similarity
        assert logits is not None
        return (_spread(self.words(logits)) + _spread(similarity)) / 2

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the contrastive loss that `fit_` minimizes.

        It compares examples with prototypes, and with one another.

        Shape:
            hidden: (N, D); labels: (N,)
        """
        rows, count = self.project(hidden), self.num_classes
        of_points = F.cross_entropy(_compare(rows, self.points), labels) / count
        near = _compare(rows, rows).log_softmax(-1)
        same = labels[:, None] == labels
        return of_points - near[same].mean() / count

    def fit_(self, hidden: Tensor, labels: Tensor, epochs: int = 5, lr: float = 1e-3) -> None:
        """Train the prototypes on labeled examples.

        Args:
            hidden: last hidden states at the masks of the examples.
            labels: classes of the examples.
            epochs: number of optimizer steps, each on all examples.
            lr: learning rate of Adam.

        Shape:
            hidden: (N, D); labels: (N,)

        Raises:
            ShapeError: a class has no examples.
        """
        missing = sorted(set(range(self.num_classes)) - set(labels.tolist()))
        if missing:
            raise ShapeError(
                f"the classes {missing} have no examples. Pass at least one example per class."
            )
        trained = [self.project.weight, self.points]
        optimizer = torch.optim.Adam(trained, lr=lr)
        with torch.enable_grad():
            for _ in range(epochs):
                optimizer.zero_grad()
                self.loss(hidden.detach().to(self.points), labels).backward()
                optimizer.step()
        optimizer.zero_grad()


def _compare(first: Tensor, other: Tensor) -> Tensor:
    """Return the cosine similarities of all pairs of vectors."""
    return F.normalize(first, dim=-1) @ F.normalize(other, dim=-1).T


def _spread(scores: Tensor) -> Tensor:
    """Standardize every row to mean 0 and standard deviation 1; constant rows become 0."""
    spread = scores.std(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).eps)
    return (scores - scores.mean(-1, keepdim=True)) / spread
