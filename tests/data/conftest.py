"""A small corpus whose tokens, document lengths and eos are drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bmforge.data import TokenStore, TokenStoreWriter

MakeStore = Callable[..., TokenStore]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    def make(name: str = "corpus", documents: int = 40, longest: int = 30) -> TokenStore:
        generator = np.random.default_rng(len(name) + documents)
        with TokenStoreWriter(tmp_path / name, vocab_size=1000) as writer:
            for length in generator.integers(0, longest, documents).tolist():
                writer.add_item([*generator.integers(1, 1000, length).tolist(), 0])
                writer.end_document()
        return TokenStore(tmp_path / name)

    return make
