"""Training data: collect, clean, tokenize, store and load a corpus.

Start reading at `prepare/run.py` (from files to token stores), then `load/packing.py` and
`load/loader.py` (from a store to batches). `sources`, `clean` and `prepare/tokenize.py` contain the
processing steps; `report` describes a prepared corpus; `store` is the file format;
`load/order.py`, `load/mixture.py` and `load/prefetch.py` are parts of the loader; `tasks` contains
data sets for fine-tuning.
"""

from __future__ import annotations

from bmforge.data.clean.normalize import (
    CleanCount,
    drop_duplicates,
    normalize_documents,
    normalize_text,
)
from bmforge.data.load.loader import Batch, DataLoader, iter_once
from bmforge.data.load.mixture import Mixture
from bmforge.data.load.packing import Dataset, PackedDataset
from bmforge.data.prepare.documents import DocumentStage
from bmforge.data.prepare.funnel import Funnel
from bmforge.data.prepare.record import PrepareConfig, PrepareReport
from bmforge.data.prepare.run import prepare, show_preparation
from bmforge.data.prepare.split import Split, split_documents
from bmforge.data.prepare.summary import Summary
from bmforge.data.prepare.tokenize import (
    END_OF_TEXT,
    EncodeCount,
    encode_to_store,
    load_tokenizer,
    train_bpe,
)
from bmforge.data.prepare.verify import verify_store
from bmforge.data.sources.document import Document
from bmforge.data.sources.files import SkipCount, python_topics, read_documents
from bmforge.data.store.conditions import Condition, parse_conditions, select_store
from bmforge.data.store.sharded import ShardedStore, open_store, write_shard_list
from bmforge.data.store.token_store import TokenStore, check_vocabulary
from bmforge.data.store.writer import TokenStoreWriter, merge_stores

__all__ = [
    "prepare",
    "show_preparation",
    "DocumentStage",
    "Funnel",
    "Summary",
    "verify_store",
    "PrepareConfig",
    "PrepareReport",
    "Document",
    "SkipCount",
    "read_documents",
    "python_topics",
    "CleanCount",
    "normalize_text",
    "normalize_documents",
    "drop_duplicates",
    "Split",
    "split_documents",
    "END_OF_TEXT",
    "EncodeCount",
    "train_bpe",
    "load_tokenizer",
    "encode_to_store",
    "TokenStore",
    "ShardedStore",
    "open_store",
    "write_shard_list",
    "Condition",
    "parse_conditions",
    "select_store",
    "TokenStoreWriter",
    "merge_stores",
    "check_vocabulary",
    "Dataset",
    "PackedDataset",
    "Mixture",
    "Batch",
    "DataLoader",
    "iter_once",
]
