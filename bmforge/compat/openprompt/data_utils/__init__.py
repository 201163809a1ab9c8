"""Examples, dataset readers and samplers; start at `processors.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from bmforge.compat.openprompt.data_utils.data_processor import DataProcessor
from bmforge.compat.openprompt.data_utils.processors import CLASSES, PROCESSORS
from bmforge.compat.openprompt.examples import InputExample, InputFeatures
from bmforge.errors import ConfigError, DataError, suggest
from bmforge.tune.prompt import draw_few

__all__ = [
    "PROCESSORS", "DataProcessor", "FewShotSampler", "InputExample", "InputFeatures",
    "load_dataset",
]  # fmt: skip

_LOG = logging.getLogger(__name__)
# The classes of the table have names too: `from openprompt.data_utils... import AgnewsProcessor`.
__all__ += [*CLASSES]
globals().update(CLASSES)


def load_dataset(config: Any, return_class: bool = True, test: bool = False) -> tuple[Any, ...]:
    """Read the splits of the dataset that a configuration names.

    Args:
        config: configuration whose `dataset.name` is a key of `PROCESSORS` and whose
            `dataset.path` is the dataset's folder.
        return_class: return the processor too.
        test: read the test split only.

    Returns:
        a tuple of the training, validation and test examples, each None if the split has no file;
        with `return_class`, also the processor.

    Raises:
        DataError: the dataset is unknown, or no split has a file.
    """
    name, folder = config.dataset.name.lower(), config.dataset.path
    keys = {key.lower(): key for key in PROCESSORS}
    if name not in keys:
        names = ", ".join(PROCESSORS)
        raise DataError(
            f"unknown dataset: dataset.name={name!r} (supported: {names}).{suggest(name, keys)}"
        )
    processor = PROCESSORS[keys[name]]()
    splits: list[list[InputExample] | None] = []
    for split in ("train", "dev", "test"):
        try:
            splits.append(
                None if test and split != "test" else processor.get_examples(folder, split)
            )
        except FileNotFoundError as error:
            logging.getLogger("bmforge").warning(
                "dataset %s has no %s split: %s", name, split, error
            )
            splits.append(None)
    if not any(split is not None for split in splits):
        raise DataError(
            f"{folder!r} contains no file of the dataset {name}. Pass the folder with the files "
            "of the dataset."
        )
    return (*splits, processor) if return_class else tuple(splits)


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
                "number for both). Leave num_examples_per_label_dev and num_examples_total_dev "
                "out."
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
