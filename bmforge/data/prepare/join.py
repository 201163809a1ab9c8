"""Combines the token stores of the shards: merged into one, or listed as a sharded store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from bmforge.data.prepare.encode import SIDES
from bmforge.data.prepare.outputs import name_shard
from bmforge.data.prepare.shards import ShardPlan
from bmforge.data.prepare.tokenize import EncodeCount
from bmforge.data.store.columns import columns_path, join_columns, read_columns
from bmforge.data.store.sharded import write_shard_list
from bmforge.data.store.token_store import TokenStore, store_paths
from bmforge.data.store.writer import merge_stores

__all__ = ["STORE_NAME", "join_stores"]

STORE_NAME = "tokens"  # file name of the store; the shard index is appended to a shard's name
Cuts = dict[str, list[tuple[int, int, str]]]


def join_stores(
    plan: ShardPlan, results: Sequence[Any], encoded: Path, finished: Path, into_one: bool
) -> tuple[dict[str, EncodeCount], Cuts]:
    """Combine the shards' token stores into the training and validation stores of the corpus.

    Args:
        plan: the inputs and shards.
        results: results of encoding each shard.
        encoded: folder of the shards' stores.
        finished: temporary folder in which the corpus is assembled.
        into_one: True to copy the stores into one; False to keep them as a sharded store.

    Returns:
        the counts per split, and a dict from the path of each .bin file to its parts: (shard index,
        end offset in bytes, names of the inputs).
    """
    counts: dict[str, EncodeCount] = {}
    cuts: Cuts = {}
    for side in SIDES:
        parts = [EncodeCount(**result[side]) for result in results]
        counts[side] = EncodeCount(
            sum(part.documents for part in parts),
            sum(part.text_bytes for part in parts),
            sum(part.tokens for part in parts),
        )
        shards = [number for number, part in enumerate(parts) if part.documents]
        prefixes = [encoded / f"{number:06d}.{side}" for number in shards]
        named = [name_shard(plan.shards[number]) for number in shards]
        prefix = finished / side / STORE_NAME
        if not prefixes:
            continue
        if into_one:
            merge_stores(prefixes, prefix)
            join_columns([read_columns(TokenStore(source_file)) for source_file in prefixes]).write(
                prefix
            )
            ends = accumulate(
                store_paths(source_file)[0].stat().st_size for source_file in prefixes
            )
            cuts[f"{side}/{STORE_NAME}.bin"] = list(zip(shards, ends, named, strict=True))
            continue
        beside = [prefix.with_name(f"{STORE_NAME}.{number:06d}") for number in shards]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        for number, source, target, inputs in zip(shards, prefixes, beside, named, strict=True):
            for source_file, other in zip(_files(source), _files(target), strict=True):
                _link(source_file, other)
            size = store_paths(target)[0].stat().st_size
            cuts[f"{side}/{target.name}.bin"] = [(number, size, inputs)]
        write_shard_list(prefix, beside)
    return counts, cuts


def _files(prefix: Path) -> tuple[Path, ...]:
    return (*store_paths(prefix), columns_path(prefix))


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
