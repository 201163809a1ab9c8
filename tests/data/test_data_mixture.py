from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.data import DataLoader, Mixture, PackedDataset, iter_once
from bmforge.data.load.mixture import assign_sources, integer_shares
from bmforge.errors import ConfigError, DataError


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_every_prefix_is_within_one_of_its_share(counts: list[int]) -> None:
    period = sum(counts)
    table = assign_sources(counts)
    had = [0] * len(counts)
    for n, source in enumerate(np.concatenate([table, table]).tolist(), start=1):
        had[source] += 1
        for i, count in enumerate(counts):
            assert abs(had[i] - Fraction(count, period) * n) < 1
    assert had == [2 * count for count in counts]


def test_integer_shares() -> None:
    assert integer_shares({"a": 0.7, "b": 0.2, "c": 0.1}) == [7, 2, 1]
    assert integer_shares({"a": 1 / 3, "b": 2 / 3}) == [1, 2]
    assert integer_shares({"a": 3, "b": 3}) == [1, 1]
    odd = integer_shares({"a": math.pi, "b": math.e})
    assert sum(odd) == 65536
    assert abs(odd[0] / 65536 - math.pi / (math.pi + math.e)) < 1 / 65536
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="'b'"):
            integer_shares({"a": 1.0, "b": weight})
    with pytest.raises(ConfigError, match="below 1/65536"):
        integer_shares({"a": 1.0, "b": 1e-7})


def test_samples_are_each_corpus_own_order(make_store) -> None:
    parts = {
        name: PackedDataset(make_store(name, documents), 8, eos_id=0)
        for name, documents in (("web", 60), ("code", 10), ("maths", 25))
    }
    weights = {"web": 0.5, "code": 0.3, "maths": 0.2}
    mixture = Mixture({name: (parts[name], weights[name]) for name in parts})
    assert mixture.shares == {"code": 3, "maths": 2, "web": 5}
    rows = mixture.training_rows(np.arange(400), seed=3)
    sources, own = mixture.source_of(np.arange(400))
    for i, name in enumerate(mixture.names):
        here = sources == i
        assert own[here].tolist() == list(range(int(weights[name] * 400)))
        alone = PackedDataset(parts[name].store, 8, 0, name)
        assert (rows[here] == alone.training_rows(own[here], 3)).all()
    backwards = dict(reversed([(name, (parts[name], weights[name])) for name in parts]))
    assert (Mixture(backwards).training_rows(np.arange(400), 3) == rows).all()


def test_mixture_through_the_loader(make_store) -> None:
    mixture = Mixture({n: (PackedDataset(make_store(n), 8), w) for n, w in (("a", 1), ("bb", 2))})
    with DataLoader(mixture, global_batch_size=6, micro_batch_size=2) as loader:
        got = [batch["input_ids"] for step in itertools.islice(loader, 3) for batch in step]
    expected = mixture.training_rows(np.arange(18), 0)
    assert (np.concatenate(got) == expected).all()
    rows = sum(len(batch["input_ids"]) for batch in iter_once(mixture, 1))
    assert rows == mixture.num_held_out_rows()


def test_parts_must_fit(make_store) -> None:
    store = make_store()
    with pytest.raises(ConfigError, match="seq_len=9"):
        Mixture({"a": (PackedDataset(store, 8), 1), "b": (PackedDataset(store, 9), 1)})
    with pytest.raises(ConfigError, match="at least one"):
        Mixture({})
    long = Mixture({"a": (PackedDataset(store, 10**6), 1)})
    with pytest.raises(DataError, match="seq_len=1000000"):
        DataLoader(long, global_batch_size=1, micro_batch_size=1)
