"""OpenPrompt's few-shot sampler; a seed selects the same examples as `draw_few`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bmforge.errors import ConfigError
from bmforge.tune.prompt import draw_few

__all__ = ["FewShotSampler"]


class FewShotSampler:
    """Selects a few examples at random.

    Args:
        num_examples_total: total number of examples; None if `num_examples_per_label` is set
            (exactly one must be).
        num_examples_per_label: number of examples per label; None if `num_examples_total` is set.
        also_sample_dev: also select the same number of examples for validation.
        num_examples_total_dev, num_examples_per_label_dev: numbers for validation; must equal
            those for training.

    Raises:
        ConfigError: neither or both counts are set, or the validation counts differ from those for
            training.
    """

    def __init__(
        self,
        num_examples_total: int | None = None,
        num_examples_per_label: int | None = None,
        also_sample_dev: bool = False,
        num_examples_total_dev: int | None = None,
        num_examples_per_label_dev: int | None = None,
    ) -> None:
        if (num_examples_total is None) == (num_examples_per_label is None):
            raise ConfigError(
                f"num_examples_total={num_examples_total} and "
                f"num_examples_per_label={num_examples_per_label} must not both be set, or both be "
                "None. Pass exactly one of them."
            )
        second = num_examples_total_dev, num_examples_per_label_dev
        first = num_examples_total, num_examples_per_label
        if any(b not in (None, a) for a, b in zip(first, second, strict=True)):
            raise ConfigError(
                "the numbers of training and validation examples differ (allowed: the same "
                "number of both). Leave num_examples_per_label_dev and "
                "num_examples_total_dev out."
            )
        self.total, self.per_label = num_examples_total or 0, num_examples_per_label or 0
        self.also_sample_dev = also_sample_dev

    def __call__(
        self,
        train_dataset: Sequence[Any],
        valid_dataset: Sequence[Any] | None = None,
        seed: int | None = None,
    ) -> Any:
        """Return the selected examples, and the validation examples if they are selected too.

        Args:
            train_dataset: examples to select from.
            valid_dataset: examples to select validation examples from (default: the remaining
                examples).
            seed: random seed (default: 0).
        """
        options: Any = {"per_label": self.per_label, "total": self.total, "seed": seed or 0}
        labels = [example.label for example in train_dataset]
        if not self.also_sample_dev:
            return self._take(train_dataset, draw_few(labels, **options, allow_fewer=True)[0])
        if valid_dataset is None:
            train, dev = draw_few(labels, **options, with_dev=True, allow_fewer=True)
            return self._take(train_dataset, train), self._take(train_dataset, dev)
        train, _ = draw_few(labels, **options, allow_fewer=True)
        dev, _ = draw_few([e.label for e in valid_dataset], **options, allow_fewer=True)
        return self._take(train_dataset, train), self._take(valid_dataset, dev)

    def _take(self, examples: Sequence[Any], places: Sequence[int]) -> list[Any]:
        return [examples[index] for index in places]
