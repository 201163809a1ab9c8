"""LCQMC (question paraphrase detection) for CPM-2."""

from __future__ import annotations

from bmforge.compat.model_center.dataset.pretraining import CPM2_Dataset
from bmforge.compat.model_center.dataset.rows import CHINESE_TASKS, make_datasets
from bmforge.compat.model_center.dataset.t5dataset import T5Rows
from bmforge.data.tasks import TaskExample

__all__ = ["CPM2_Dataset", "DATASET", "CPM2Rows"]


class CPM2Rows(T5Rows):
    """One split of a task, encoded for CPM-2: as in `T5Rows`, but with CPM-2's sentinel token.

    Texts that are too long raise a DataError.
    """

    needs_distinct = True

    def tokens(self, example: TaskExample) -> tuple[list[int], list[int]]:
        """Return the token ids of the encoder, and the decoder's first token."""
        blank = self.tokenizer.get_sentinel_id(0)
        return self.check_length([*self.prompt_ids(example), blank], example), [blank]


DATASET = make_datasets(CPM2Rows, {name: {} for name in CHINESE_TASKS})
