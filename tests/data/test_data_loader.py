from __future__ import annotations

import gc
import itertools
import random
import threading

import numpy as np
import pytest
import torch

from bmforge.data import DataLoader, PackedDataset, TokenStore, TokenStoreWriter, iter_once
from bmforge.data.load.prefetch import Prefetcher
from bmforge.errors import ConfigError, DataError

KEYS = ("input_ids", "labels", "position_ids", "document_ids")


def collect(loader: DataLoader, steps: int) -> list[list[dict[str, torch.Tensor]]]:
    with loader:
        return list(itertools.islice(loader, steps))


def same(first: list, second: list) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def real_rows(step: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [
        tuple(ids.tolist())
        for batch in step
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        if (labels != -100).any()
    ]


@pytest.mark.parametrize(("rows", "micro"), [(12, 2), (7, 2), (1, 3), (5, 4)])
def test_any_world_sees_the_same_rows(make_store, rows: int, micro: int) -> None:
    dataset = PackedDataset(make_store(documents=200), 16, eos_id=0)
    reference = dataset.training_rows(np.arange(4 * rows), 11).reshape(4, rows, 16)
    for world in (1, 2, 3, 4):
        ranks = [
            collect(
                DataLoader(
                    dataset, global_batch_size=rows, micro_batch_size=micro,
                    rank=rank, world=world, seed=11,
                ),
                4,
            )
            for rank in range(world)
        ]  # fmt: skip
        count = -(-rows // (micro * world))
        assert all(len(step) == count for steps in ranks for step in steps)
        assert {b["labels"].shape for r in ranks for s in r for b in s} == {(micro, 16)}
        for step in range(4):
            slots = [
                row
                for m in range(count)
                for rank in range(world)
                for row in real_rows([ranks[rank][step][m]])
            ]
            assert slots == [tuple(row) for row in reference[step].tolist()]


def test_one_epoch_predicts_every_token_once(make_store) -> None:
    store = make_store(documents=50)
    dataset = PackedDataset(store, 9)
    count = dataset.samples_per_epoch
    for epoch in (0, 1):
        starts = dataset.training_starts(np.arange(count) + epoch * count, seed=5)
        predicted = (starts[:, None] + np.arange(1, 9)) % store.num_tokens
        assert len(np.unique(predicted)) == predicted.size == count * 8
        assert predicted.size > store.num_tokens - 8
    across = dataset.training_starts(np.arange(count - 3, count + 3), seed=5)
    pieces = [dataset.training_starts(np.array([i]), 5)[0] for i in range(count - 3, count + 3)]
    assert across.tolist() == pieces
    tokens = np.concatenate([store.tokens, store.tokens])
    rows = dataset.training_rows(np.arange(count), 5)
    starts = dataset.training_starts(np.arange(count), 5)
    assert (rows == np.stack([tokens[s : s + 9] for s in starts])).all()


def test_seeds_and_epochs_differ(make_store) -> None:
    dataset = PackedDataset(make_store(documents=50), 9)
    n = dataset.samples_per_epoch
    orders = [dataset.training_starts(np.arange(n) + e * n, s) for s in (0, 1) for e in (0, 1)]
    assert all((a != b).any() for a, b in itertools.combinations(orders, 2))
    cuts = {tuple(np.sort(order)[1:3] % 8) for order in orders}
    assert len(cuts) > 1  # every epoch is cut elsewhere


@pytest.mark.parametrize("prefetch_steps", [0, 1, 2, 5])
def test_resume_is_bit_identical(make_store, prefetch_steps: int) -> None:
    dataset = PackedDataset(make_store(documents=30), 16, eos_id=0)

    def loader(seed: int = 3, rows: int = 5) -> DataLoader:
        return DataLoader(
            dataset, global_batch_size=rows, micro_batch_size=2, seed=seed,
            reset_at_documents=True, prefetch_steps=prefetch_steps,
        )  # fmt: skip

    whole = collect(loader(), 40)  # several epochs
    assert tuple(whole[0][0]) == (*KEYS, "attention_mask")  # 5 rows in micro-batches of 2
    assert [b["attention_mask"].sum().item() for b in whole[0]] == [32, 32, 16]
    for stop in (0, 1, 17):
        first = loader()
        assert same(list(itertools.islice(first, stop)), whole[:stop])
        state = first.state_dict()
        assert (state["step"], state["samples"]) == (stop, 5 * stop)
        assert all(type(value) is int for value in state.values())
        first.close()
        assert same(collect(first, 2), whole[stop : stop + 2])  # closing loses nothing
        second = loader()
        next(second)
        second.load_state_dict(state)
        assert same(collect(second, 40 - stop), whole[stop:])
    with pytest.raises(ConfigError, match="seed"):
        loader(seed=4).load_state_dict(state)
    shorter = PackedDataset(dataset.store, 15)
    other = DataLoader(shorter, global_batch_size=5, micro_batch_size=2, seed=3)
    with pytest.raises(ConfigError, match="corpus"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"lacks .*samples"):
        loader().load_state_dict({"step": 1})
    larger = loader(rows=10)
    larger.load_state_dict(state)
    rows = [row for step in whole[17:19] for row in real_rows(step)]
    assert real_rows(collect(larger, 1)[0]) == rows


def test_no_global_random_state_is_used(make_store) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    collect(DataLoader(PackedDataset(make_store(), 8), global_batch_size=2, micro_batch_size=1), 5)
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert states[2] == torch.get_rng_state().tolist()


def plain_reset(row: list[int], length: int, eos: int) -> tuple[list, list, list]:
    """Labels, positions and document numbers of one row, token by token."""
    labels, positions, documents = [], [], []
    position = document = 0
    for i, token in enumerate(row):
        begins = 0 < i < length and row[i - 1] == eos
        if begins:
            position, document = 0, document + 1
        labels.append(-100 if begins or i >= length else token)
        positions.append(position)
        documents.append(document)
        position += 1
    return labels, positions, documents


def test_resets_against_a_plain_loop(make_store) -> None:
    dataset = PackedDataset(make_store(longest=9), 32, eos_id=0)
    loader = DataLoader(
        dataset, global_batch_size=5, micro_batch_size=3, seed=1, reset_at_documents=True
    )
    batches = [(b, 32) for step in collect(loader, 20) for b in step]
    seen_documents = 0
    for batch, length in batches:
        for i, row in enumerate(batch["input_ids"].tolist()):
            padding = not any(row)
            expected = plain_reset(row, 0 if padding else length, 0)
            got = tuple(batch[key][i].tolist() for key in KEYS[1:])
            assert got == expected
            seen_documents = max(seen_documents, got[2][-1])
    assert seen_documents > 3


@pytest.mark.parametrize("tokens", [2, 3, 7, 8, 9, 15, 16, 61])
@pytest.mark.parametrize("reset", [False, True])
def test_held_out_pass_predicts_every_token_once(tmp_path, tokens: int, reset: bool) -> None:
    ids = np.arange(1, tokens + 1)
    ids[5::6] = 0
    with TokenStoreWriter(tmp_path / "s", vocab_size=100) as writer:
        writer.add_item(ids)
    dataset = PackedDataset(TokenStore(tmp_path / "s"), 8, eos_id=0)
    expected = [
        (int(a), int(b)) for a, b in itertools.pairwise(ids) if not (reset and a == 0)
    ]  # (token before, token predicted)
    for world in (1, 2, 3):
        ranks = [
            list(iter_once(dataset, 2, rank, world, reset_at_documents=reset))
            for rank in range(world)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        pairs = []
        for batches in zip(*ranks, strict=True):
            for batch in batches:
                assert batch["labels"].shape == (2, 8)
                before, labels = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
                mask = labels != -100
                pairs += list(zip(before[mask].tolist(), labels[mask].tolist(), strict=True))
        assert pairs == expected


def test_max_batches_does_not_depend_on_world(make_store) -> None:
    dataset = PackedDataset(make_store(), 8)
    seen = []
    for world in (1, 2, 4):
        batches = [list(iter_once(dataset, 3, rank, world, 5)) for rank in range(world)]
        assert {len(b) for b in batches} == {-(-5 // world)}
        seen.append(sorted(row for b in batches for row in real_rows(b)))
    assert len(seen[0]) == 15
    assert seen[0] == seen[1] == seen[2]


def test_bad_settings(make_store, tmp_path) -> None:
    dataset = PackedDataset(make_store(), 8)
    for wrong in (
        {"global_batch_size": 0},
        {"micro_batch_size": 0},
        {"rank": 2, "world": 2},
        {"prefetch_steps": -1},
        {"reset_at_documents": True},
    ):
        with pytest.raises(ConfigError, match="eos_id" if True in wrong.values() else "="):
            DataLoader(dataset, **{"global_batch_size": 2, "micro_batch_size": 1, **wrong})
    with pytest.raises(ConfigError, match="seq_len=1"):
        PackedDataset(dataset.store, 1)
    with pytest.raises(ConfigError, match="max_batches=0"):
        iter_once(dataset, 1, max_batches=0)
    tokens = dataset.store.num_tokens
    short = PackedDataset(dataset.store, tokens + 1)
    with pytest.raises(DataError, match=f"has {tokens} tokens.*at most {tokens}"):
        DataLoader(short, global_batch_size=2, micro_batch_size=1)
    collect(
        DataLoader(PackedDataset(dataset.store, tokens), global_batch_size=2, micro_batch_size=1), 3
    )
    with TokenStoreWriter(tmp_path / "one", vocab_size=100) as writer:
        writer.add_item([1])
    with pytest.raises(DataError, match="nothing to predict"):
        iter_once(PackedDataset(TokenStore(tmp_path / "one"), 8), 2)


def prefetch_threads() -> int:
    return sum(thread.name == "bmforge-prefetch" for thread in threading.enumerate())


def test_prefetch_threads_end(make_store) -> None:
    dataset = PackedDataset(make_store(), 8)
    loader = DataLoader(dataset, global_batch_size=2, micro_batch_size=1)
    assert prefetch_threads() == 0
    next(loader)
    assert prefetch_threads() == 1
    loader.close()
    loader.close()
    assert prefetch_threads() == 0
    next(loader)
    del loader
    gc.collect()
    assert prefetch_threads() == 0


def test_prefetch_keeps_its_depth() -> None:
    started = [threading.Event() for _ in range(400)]
    waiting: list[int] = []
    built = threading.Event()

    def make(i: int) -> int:
        built.wait(30)
        waiting.append(len(prefetcher._ready))
        started[i].set()
        return i

    prefetcher = Prefetcher(make, 0, depth=2)
    built.set()
    for i in range(300):
        assert started[i + 1].wait(30)  # it runs ahead without being asked
        assert prefetcher.take() == i
    prefetcher.stop()
    assert max(waiting) == 1  # an item is begun only where fewer than two wait


def test_prefetch_surfaces_errors_at_their_turn() -> None:
    def make(i: int) -> int:
        if i == 4:
            raise OSError("disk is gone")
        return i

    prefetcher = Prefetcher(make, 0, depth=2)
    assert [prefetcher.take() for _ in range(4)] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="disk is gone"):
            prefetcher.take()
    prefetcher.stop()
    with pytest.raises(OSError, match="disk is gone"):
        prefetcher.take()


def test_error_in_the_thread_leaves_the_state(make_store, monkeypatch) -> None:
    dataset = PackedDataset(make_store(), 8)
    loader = DataLoader(dataset, global_batch_size=2, micro_batch_size=1)
    expected = collect(loader, 3)
    loader = DataLoader(dataset, global_batch_size=2, micro_batch_size=1)
    next(loader)
    loader.close()

    def fail(numbers: np.ndarray, seed: int) -> np.ndarray:
        raise OSError("disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "training_rows", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="disk is gone"):
                next(loader)
    assert loader.state_dict()["step"] == 1
    assert same(collect(loader, 2), expected[1:])
