"""Task data and corpora under ModelCenter's names.

Start reading at `rows.py` (what the task datasets share, and the texts that ask), then
`bertdataset`, `gpt2dataset`, `llamadataset`, `t5dataset`, `cpm1dataset` and `cpm2dataset`, each
with its `DATASET`; `loader.py` makes batches, `indexed.py` opens corpora.
"""

from __future__ import annotations

from bmforge.compat.model_center.dataset.indexed import (
    DistributedMMapIndexedDataset,
    MMapIndexedDataset,
)
from bmforge.compat.model_center.dataset.loader import DistributedDataLoader

__all__ = ["DistributedDataLoader", "DistributedMMapIndexedDataset", "MMapIndexedDataset"]

_ELSEWHERE = {
    "DistributedDataset": "bmforge.data.store.blocks.BlockDataset reads such a dataset",
    "SimpleDataset": "bmforge.data.store.blocks.BlockDataset reads such a dataset",
    "build_dataset": "bmforge prepare writes a corpus that every recipe reads",
    "shuffle_dataset": "bmforge.data.DataLoader shuffles while it reads",
    "compact_dataset": "bmforge.data.store.blocks.blocks_to_store writes a dataset anew",
    "mask_dataset": "leave its files out of the recipe's data.paths",
    "CPM1_Dataset": "bmforge train cpm1-pretrain reads the corpus",
    "CPM1_Dataset_Merge": "bmforge train cpm1-pretrain reads the corpus",
    "CPM2_Dataset": "bmforge train cpm2-pretrain reads the corpus",
}


def __getattr__(name: str) -> object:
    """Say what to use for an old name that is not here."""
    told = f": {_ELSEWHERE[name]}." if name in _ELSEWHERE else "."
    raise AttributeError(f"bmforge.compat.model_center.dataset has no {name!r}{told}")
