"""OpenPrompt's base class of dataset readers, and a factory for the readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bmforge.compat.openprompt.examples import InputExample
from bmforge.errors import DataError

__all__ = ["DataProcessor", "FileProcessor", "Reader", "define_processor"]

# Function that yields, for each example in a file, the keyword arguments of its `InputExample`. A
# label that is one of the processor's labels is replaced by its index.
Reader = Callable[[Path, str], Iterator[dict[str, Any]]]


class DataProcessor:
    """Reads the examples of a dataset's splits, and maps its labels to indices.

    Args:
        labels: labels of the dataset, in the order of their indices.
        labels_path: text file with the labels, separated by whitespace; used if `labels` is None.
    """

    def __init__(
        self, labels: Sequence[Any] | None = None, labels_path: str | Path | None = None
    ) -> None:
        if labels is None and labels_path is not None:
            labels = Path(labels_path).read_text("utf-8").split()
        self._labels = None if labels is None else list(labels)

    @property
    def labels(self) -> list[Any]:
        """Labels of the dataset.

        Raises:
            ValueError: the dataset has no labels.
        """
        if self._labels is None:
            raise ValueError(f"{type(self).__name__} has no labels. Set `labels` first.")
        return self._labels

    @labels.setter
    def labels(self, labels: Sequence[Any]) -> None:
        self._labels = list(labels)

    @property
    def label_mapping(self) -> dict[Any, int]:
        """Dict from label to index."""
        return {label: index for index, label in enumerate(self.labels)}

    @label_mapping.setter
    def label_mapping(self, mapping: Mapping[Any, int]) -> None:
        self._labels = sorted(mapping, key=lambda label: mapping[label])

    @property
    def id2label(self) -> dict[int, Any]:
        """Dict from index to label."""
        return dict(enumerate(self.labels))

    def get_label_id(self, label: Any) -> int | None:
        """Return the index of a label; None if the label is None."""
        return None if label is None else self.label_mapping[label]

    def get_labels(self) -> list[Any]:
        """Return the labels of the dataset."""
        return self.labels

    def get_num_labels(self) -> int:
        """Return the number of labels."""
        return len(self.labels)

    def get_train_examples(self, data_dir: str | Path) -> list[InputExample]:
        """Return the training examples in a folder."""
        return self.get_examples(data_dir, "train")

    def get_dev_examples(self, data_dir: str | Path) -> list[InputExample]:
        """Return the validation examples in a folder."""
        return self.get_examples(data_dir, "dev")

    def get_test_examples(self, data_dir: str | Path) -> list[InputExample]:
        """Return the test examples in a folder."""
        return self.get_examples(data_dir, "test")

    def get_unlabeled_examples(self, data_dir: str | Path) -> list[InputExample]:
        """Return the unlabeled examples in a folder."""
        return self.get_examples(data_dir, "unlabeled")

    def get_examples(self, data_dir: str | Path, split: str) -> list[InputExample]:
        """Return the examples of one split; subclasses define this method.

        Args:
            data_dir: folder of the dataset.
            split: name of the split: "train", "dev", "test" or "unlabeled".
        """
        raise NotImplementedError(f"{type(self).__name__} does not define get_examples().")


class FileProcessor(DataProcessor):
    """A processor that reads one file per split; subclasses set the class attributes.

    Attributes:
        LABELS: labels in the order of their indices; None for a dataset without labels.
        FILE: path of a split's file in the dataset's folder, with `{split}`.
        READ: function that yields the examples of a file.
        SPLITS: dict from a split to its name in the file path, if the two differ.
    """

    LABELS: ClassVar[Sequence[Any] | None] = None
    FILE: ClassVar[str] = ""
    READ: ClassVar[Reader]
    SPLITS: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        super().__init__(self.LABELS)

    def get_examples(self, data_dir: str | Path, split: str) -> list[InputExample]:
        """Return the examples of one split.

        Raises:
            FileNotFoundError: the split has no file in the folder.
            DataError: the file has a different format, or a label is unknown.
        """
        path = Path(data_dir) / self.FILE.format(split=self.SPLITS.get(split, split))
        if not path.exists():
            raise FileNotFoundError(
                f"{str(path)!r} does not exist. Pass the folder with the files of the dataset."
            )
        indices = {} if self._labels is None else self.label_mapping
        examples = []
        for number, values in enumerate(type(self).READ(path, split)):
            label = values.get("label")
            if label in indices:
                values["label"] = indices[label]
            elif label is not None:
                raise DataError(
                    f"{str(path)!r}, example {number + 1}: unknown label: label={label!r} "
                    f"(supported: {', '.join(map(str, indices))})."
                )
            examples.append(InputExample(**{"guid": str(number), **values}))
        return examples


def define_processor(
    name: str,
    labels: Sequence[Any] | None,
    file: str,
    read: Reader,
    splits: Mapping[str, str] | None = None,
) -> type[DataProcessor]:
    """Create a subclass of `FileProcessor` with the given class attributes."""
    attributes: dict[str, Any] = {"LABELS": labels, "FILE": file, "READ": staticmethod(read)}
    attributes |= {"SPLITS": splits or {}, "__doc__": f"Reads {file}."}
    return type(name, (FileProcessor,), attributes)
