"""Many stores read as one, against the one that they are merged into; documents chosen of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.data import (
    PackedDataset,
    PrepareConfig,
    ShardedStore,
    TokenStore,
    TokenStoreWriter,
    merge_stores,
    open_store,
    parse_conditions,
    prepare,
    select_store,
    verify_store,
    write_shard_list,
)
from bmforge.data.prepare.record import read_record
from bmforge.data.store.columns import NAMED, columns_path, read_columns
from bmforge.data.store.lazy import ConcatenatedArray, GatheredArray
from bmforge.errors import ConfigError, DataError

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.2, shard_bytes=900)


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_joined_arrays_read_as_one(parts: list[list[int]], data: st.DataObject) -> None:
    plain = np.concatenate([np.array(part, dtype=np.int64) for part in parts])
    joined = ConcatenatedArray([np.array(part, dtype=np.uint16) for part in parts], np.int64)
    assert len(joined) == len(plain)
    assert np.array_equal(np.asarray(joined), plain)
    low, high = (data.draw(st.integers(-9, 30)) for _ in range(2))
    assert np.array_equal(joined[low:high], plain[low:high])
    if len(plain):
        places = np.array(
            data.draw(st.lists(st.integers(-len(plain), len(plain) - 1), min_size=1)), dtype=int
        )
        assert np.array_equal(joined[places], plain[places])
        assert joined[int(places[0])] == plain[places[0]]
        edges = sorted(data.draw(st.sets(st.integers(0, len(plain)), min_size=2)) | {0})
        spans = np.array(list(pairwise(edges))[::2], dtype=np.int64)
        chosen = np.concatenate([plain[a:b] for a, b in spans])
        picked = GatheredArray(joined, spans)
        assert np.array_equal(np.asarray(picked), chosen)
        assert np.array_equal(picked[low:high], chosen[low:high])
        if len(chosen):
            some = places % len(chosen)
            assert np.array_equal(picked[some], chosen[some])
    with pytest.raises(IndexError, match="out of range"):
        joined[len(plain)]


@pytest.fixture
def stores(tmp_path: Path) -> tuple[ShardedStore, TokenStore]:
    """Four stores of different dtypes, one without documents; as one by a list, and merged."""
    draw = np.random.default_rng(0)
    prefixes = []
    for number, dtype in enumerate(("<u2", "<i4", "<u2", "<i8")):
        prefix = tmp_path / f"tokens.{number}"
        with TokenStoreWriter(prefix, dtype) as writer:
            for length in [] if number == 2 else draw.integers(1, 30, 9).tolist():
                writer.add_item(draw.integers(1, 500, length))
                if length % 3:
                    writer.end_document()
        prefixes.append(prefix)
    write_shard_list(tmp_path / "tokens", prefixes)
    merge_stores(prefixes, tmp_path / "merged")
    store = open_store(tmp_path / "tokens")
    assert isinstance(store, ShardedStore)
    return store, TokenStore(tmp_path / "merged")


def test_shards_are_what_they_are_merged_into(stores: tuple[ShardedStore, TokenStore]) -> None:
    many, one = stores
    for name in ("tokens", "sizes", "pointers", "doc_idx"):
        assert np.array_equal(np.asarray(getattr(many, name)), getattr(one, name)), name
    assert (len(many), many.num_tokens, many.num_documents, many.dtype) == (
        len(one),
        one.num_tokens,
        one.num_documents,
        one.dtype,
    )
    assert list(many.documents()) == list(one.documents())
    assert all(np.array_equal(many[i], one[i]) for i in range(-1, len(one)))
    assert np.array_equal(many.get(5, 1, 1), one.get(5, 1, 1))
    assert many.digest() == one.digest()
    numbers = np.arange(200)
    rows = [PackedDataset(store, 16, eos_id=0).training_rows(numbers, 3) for store in stores]
    assert np.array_equal(*rows)
    held = [PackedDataset(store, 16, eos_id=0).held_out_rows(numbers[:20])[0] for store in stores]
    assert np.array_equal(*held)


def test_a_list_that_does_not_fit_is_refused(
    stores: tuple[ShardedStore, TokenStore], tmp_path: Path
) -> None:
    path = tmp_path / "tokens.shards"
    record = json.loads(path.read_text())
    with pytest.raises(ConfigError, match="in the directory of"):
        write_shard_list(tmp_path / "deep" / "tokens", [tmp_path / "tokens.0"])
    with pytest.raises(ConfigError, match="each shard only once"):
        write_shard_list(tmp_path / "other", [tmp_path / "tokens.0"] * 2)
    (tmp_path / "tokens.1.bin").replace(tmp_path / "away")
    with pytest.raises(DataError, match=r"tokens\.1\.bin.*does not exist"):
        open_store(tmp_path / "tokens")
    (tmp_path / "away").replace(tmp_path / "tokens.1.bin")
    record["shards"][1]["tokens"] += 1
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"tokens\.1'? has"):
        open_store(tmp_path / "tokens")
    for damaged in ({}, {"format": 2}, {"format": 1, "shards": []}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(DataError, match="not a list of shards"):
            open_store(tmp_path / "tokens")
    path.write_text(json.dumps({"format": 1, "shards": [{**record["shards"][0], "name": "../x"}]}))
    with pytest.raises(DataError, match="outside of the directory"):
        open_store(tmp_path / "tokens")


def write_texts(folder: Path) -> list[dict[str, str]]:
    """Two files of documents with languages, dates and licenses, some without."""
    folder.mkdir()
    rows = [
        {
            "text": f"text number {n} of a few about the river and its mill " * (2 + n % 4),
            "language": ("en", "zh", "de", "")[n % 4],
            "date": ("2019-12-31", "2020", "2020-05-06", "2021-01", "")[n % 5],
            "license": ("mit", "cc-by-4.0", "")[n % 3],
            "url": f"https://{'ab'[n % 2]}.example/{n}" if n % 3 else "",
        }
        for n in range(48)
    ]
    for name, part in (("one", rows[:30]), ("two", rows[30:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines)
    return rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    write_texts(root / "in")
    prepare(root / "in", root / "one", CONFIG)
    prepare(root / "in", root / "many", replace(CONFIG, join_stores=False))
    return root


def test_shards_of_a_preparation_are_the_corpus(prepared: Path) -> None:
    one, many = (read_record(prepared / name)[0] for name in ("one", "many"))
    for prefix in ("train_prefix", "validation_prefix"):
        merged, store = open_store(getattr(one, prefix)), open_store(getattr(many, prefix))
        assert isinstance(store, ShardedStore)
        assert len(store.shards) > 3 or prefix == "validation_prefix"
        assert np.array_equal(np.asarray(store.tokens), merged.tokens)
        assert list(store.documents()) == list(merged.documents())
        first, second = read_columns(merged), read_columns(store)
        assert first.names == second.names
        assert first.rows.tobytes() == second.rows.tobytes()
    assert verify_store(prepared / "many") == []
    again = prepare(prepared / "in", prepared / "many", replace(CONFIG, join_stores=False))
    assert again.reused
    with pytest.raises(ConfigError, match="join_stores"):
        prepare(prepared / "in", prepared / "many", CONFIG)
    # Each is a store of its own, as Megatron-LM reads it.
    alone = [TokenStore(shard.prefix) for shard in store.shards]
    assert sum(shard.num_tokens for shard in alone) == merged.num_tokens


def test_the_shard_of_a_flipped_byte_is_named(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "many"
    prepare(prepared / "in", out, replace(CONFIG, join_stores=False))
    path = sorted((out / "train").glob("tokens.*.bin"))[2]
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    said = "\n".join(verify_store(out))
    assert f"train/{path.name} does not match its checksum" in said
    number = int(path.name.split(".")[1])
    assert f"shard {number} is damaged" in said
    assert ".jsonl" in said


def test_one_replaces_the_other(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for config in (replace(CONFIG, join_stores=False), CONFIG):
        prepare(prepared / "in", out, config, overwrite=True)
        assert verify_store(out) == []
    names = sorted(path.name for path in (out / "train").iterdir())
    assert names == ["tokens.bin", "tokens.doc", "tokens.idx"]


def texts_of(store: TokenStore) -> list[list[int]]:
    return [store.tokens[a:b].tolist() for a, b in store.documents()]


CONDITIONS = [
    (["language=zh"], lambda row: row["language"] == "zh"),
    (["language=zh,d*"], lambda row: row["language"] in ("zh", "de")),
    (["language!=en"], lambda row: row["language"] != "en"),
    (["date>=2020"], lambda row: row["date"] >= "2020"),
    (["date=2020"], lambda row: row["date"].startswith("2020")),
    (["date<2020-05"], lambda row: "" < row["date"] < "2020-05"),
    (["date>2020"], lambda row: row["date"] >= "2021"),
    (["date<=2019-12-31"], lambda row: row["date"] == "2019-12-31"),
    (["license=CC-BY-*"], lambda row: row["license"] == "cc-by-4.0"),
    (
        ["source=b.example", "language=zh"],
        lambda row: "//b." in row["url"] and "zh" in row.values(),
    ),
    (["source=*.jsonl"], lambda row: not row["url"]),
]


@pytest.mark.parametrize("name", ["one", "many"])
@pytest.mark.parametrize(("given", "holds"), CONDITIONS, ids=[" ".join(c[0]) for c in CONDITIONS])
def test_documents_are_chosen(prepared: Path, name: str, given: list[str], holds) -> None:
    rows = [
        json.loads(line)
        for path in sorted((prepared / "in").iterdir())
        for line in path.read_text().splitlines()
    ]
    held_out = read_record(prepared / name)[0].validation.documents
    found = 0
    for side in ("train", "validation"):
        store = open_store(prepared / name / side / "tokens")
        try:
            chosen = select_store(store, parse_conditions(given))
        except DataError:
            continue
        found += chosen.num_documents
        assert chosen.num_tokens == len(np.asarray(chosen.tokens)) == int(np.sum(chosen.sizes))
        whole = texts_of(store)
        assert all(text in whole for text in texts_of(chosen))
    assert abs(found - sum(map(holds, rows))) <= 1  # one document may be cut in two
    assert 0 < found < 48
    assert held_out


def test_rows_of_chosen_documents_have_no_others(prepared: Path) -> None:
    store = open_store(prepared / "many" / "train" / "tokens")
    chosen = select_store(store, parse_conditions(["language=zh"]))
    with_numbers = PackedDataset(chosen, 12, eos_id=0).training_rows(np.arange(60), 1)
    stream = np.asarray(chosen.tokens).tolist()
    ring = stream + stream[:12]
    windows = {tuple(ring[i : i + 12]) for i in range(len(stream))}
    assert {tuple(row) for row in with_numbers.tolist()} <= windows
    assert chosen.digest() != store.digest()
    assert np.array_equal(np.asarray(chosen.map_for_random_access()), np.asarray(chosen.tokens))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("langage=zh", "Did you mean 'language'"),
        ("language>zh", "= and !="),
        ("date>=today", "2024-05"),
        ("quality>=high", "with a number"),
        ("zh", "is not a condition"),
    ],
)
def test_conditions_of_no_form_are_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_conditions([given])


def test_what_cannot_be_chosen_is_said(prepared: Path, tmp_path: Path) -> None:
    store = open_store(prepared / "one" / "train" / "tokens")
    with pytest.raises(DataError, match=r"no document .* satisfies language=fr\. .*zh"):
        select_store(store, parse_conditions(["language=fr"]))
    with pytest.raises(DataError, match="no document"):
        select_store(store, parse_conditions(["quality>=0"]))  # of none it is known
    with TokenStoreWriter(tmp_path / "bare", vocab_size=9) as writer:
        writer.add_item([1, 2])
    with pytest.raises(DataError, match="documents cannot be selected"):
        select_store(open_store(tmp_path / "bare"), parse_conditions(["language=zh"]))
    known = columns_path(store.prefix).read_bytes()
    for damaged in (known[:-1], b"{}\n", known.replace(b'"mit"', b'"mi"', 1)[:40]):
        columns_path(tmp_path / "bare").write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            read_columns(open_store(tmp_path / "bare"))
    columns_path(tmp_path / "bare").write_bytes(known)
    with pytest.raises(DataError, match="lists"):
        read_columns(open_store(tmp_path / "bare"))
    assert set(NAMED) == {"source", "language", "license"}
