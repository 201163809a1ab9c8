"""Examples, dataset readers and samplers; start at `processors.py`."""

from __future__ import annotations

import logging
from typing import Any

from bmforge.compat.openprompt.data_utils.data_processor import DataProcessor
from bmforge.compat.openprompt.data_utils.data_sampler import FewShotSampler
from bmforge.compat.openprompt.data_utils.processors import CLASSES, PROCESSORS
from bmforge.compat.openprompt.examples import InputExample, InputFeatures
from bmforge.errors import DataError, suggest

__all__ = [
    "PROCESSORS",
    "DataProcessor",
    "FewShotSampler",
    "InputExample",
    "InputFeatures",
    "load_dataset",
]

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
            f"unknown dataset: dataset.name={name!r} (known: {names}).{suggest(name, keys)}"
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
            f"{folder!r} has no split of the dataset {name}. Give the dataset's folder."
        )
    return (*splits, processor) if return_class else tuple(splits)
