"""Task data and corpora under ModelCenter's names.

Start at `rows.py` (the base class and prompts of the task datasets), then `bertdataset`,
`gpt2dataset`, `llamadataset`, `t5dataset`, `cpm1dataset` and `cpm2dataset`, each with its
`DATASET`. `loader.py` makes batches, `indexed.py` opens corpora, `distributed_dataset.py` block
datasets; `cpm1.py` and `cpm2.py` have the pretraining samples.
"""

from __future__ import annotations

from bmforge.compat.model_center.dataset.cpm1 import CPM1_Dataset, CPM1_Dataset_Merge
from bmforge.compat.model_center.dataset.cpm2 import CPM2_Dataset
from bmforge.compat.model_center.dataset.distributed_dataset import (
    DistributedDataset,
    SimpleDataset,
    build_dataset,
    mask_dataset,
)
from bmforge.compat.model_center.dataset.indexed import (
    DistributedMMapIndexedDataset,
    MMapIndexedDataset,
)
from bmforge.compat.model_center.dataset.loader import DistributedDataLoader
from bmforge.compat.model_center.names import NAMES
from bmforge.compat.names import missing_names

__all__ = [
    "CPM1_Dataset",
    "CPM1_Dataset_Merge",
    "CPM2_Dataset",
    "DistributedDataLoader",
    "DistributedDataset",
    "DistributedMMapIndexedDataset",
    "MMapIndexedDataset",
    "SimpleDataset",
    "build_dataset",
    "mask_dataset",
]

__getattr__ = missing_names("model_center", NAMES, __all__, "dataset")
