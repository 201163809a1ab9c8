"""Duplicates: MinHash against exact sets, clusters, copies, spans against a quadratic search."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tracemalloc
from hashlib import blake2b

import numpy as np
import pytest

from bmforge.data.clean.drop import Drop
from bmforge.data.dedup import exact, files, spans
from bmforge.data.dedup.clusters import Clusters, join_group
from bmforge.data.dedup.exact import (
    cut_paragraphs,
    find_copies,
    find_repeated_numbers,
    find_repeated_paragraphs,
)
from bmforge.data.dedup.index import write_index
from bmforge.data.dedup.minhash import (
    DedupConfig,
    MinHasher,
    choose_bands,
    hash_shingles,
    jaccard,
)
from bmforge.data.dedup.near import Sketches, find_near_duplicates, read_sketches
from bmforge.data.dedup.overlap import Decontaminate, OverlapIndex, examples_of, find_overlap
from bmforge.data.dedup.spans import cut_spans, find_repeated_runs, find_repeated_spans
from bmforge.data.dedup.tokens import hash_runs, hash_tokens, split_tokens
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError

WORDS = [f"w{i}" for i in range(400)]
HAN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜"


def write(draw, size, chinese):
    """A random text of `size` words or characters, as a list."""
    return [draw.choice(HAN if chinese else WORDS) for _ in range(size)]


def join(tokens, chinese):
    return ("" if chinese else " ").join(tokens)


def exact_similarity(first, second, n=5):
    """Jaccard of the sets of n-grams, with tuples."""
    one = {tuple(first[i : i + n]) for i in range(len(first) - n + 1)}
    other = {tuple(second[i : i + n]) for i in range(len(second) - n + 1)}
    return len(one & other) / len(one | other)


def test_tokens_are_words_and_chinese_characters():
    assert split_tokens("The ＡＢＣ, don't_stop 你好world！12") == [
        *["the", "abc", "don", "t", "stop", "你", "好", "world", "12"]
    ]


def test_runs_have_equal_hashes_where_tokens_are_equal():
    draw = random.Random(0)
    tokens = [draw.choice("ab") for _ in range(300)]
    for length in (1, 2, 5):
        runs = [tuple(tokens[i : i + length]) for i in range(300 - length + 1)]
        hashes = hash_runs(hash_tokens(tokens), length).tolist()
        assert len(hashes) == len(runs)
        assert len(set(zip(runs, hashes, strict=True))) == len(set(runs)) == len(set(hashes))
    assert hash_runs(hash_tokens(["a"]), 2).size == 0


def test_signatures_are_the_smallest_permuted_hashes():
    """With Python's integers: what datasketch and datatrove compute in 64-bit words."""
    hasher = MinHasher(DedupConfig())
    shingles = np.random.default_rng(0).integers(0, 2**64, 3000, dtype=np.uint64)
    a, b = (values.ravel().tolist() for values in (hasher._a, hasher._b))
    for k in (0, 57, 111):
        expected = min((a[k] * x + b[k]) % 2**64 % (2**61 - 1) for x in shingles.tolist())
        assert hasher.sign(shingles)[k] == expected


def test_bands_follow_the_threshold():
    assert choose_bands(0.8, 112) == (14, 8)  # datatrove's default
    for threshold in (0.5, 0.7, 0.9):
        bands, rows = choose_bands(threshold, 112)
        assert bands * rows <= 112
        assert 1 - (1 - (threshold + 0.05) ** rows) ** bands >= 0.985
        longer = 112 // (rows + 1)
        assert 1 - (1 - (threshold + 0.05) ** (rows + 1)) ** longer < 0.985


@pytest.mark.parametrize("chinese", [False, True])
def test_planted_duplicates_are_found_and_others_are_not(chinese):
    draw = random.Random(3)
    documents, similar = [], []
    for number in range(40):
        tokens = write(draw, 150, chinese)
        other = list(tokens)
        for _ in range(number % 8):  # each changes up to five n-grams
            other[draw.randrange(150)] = "x" if not chinese else "鱼"
        similar.append(exact_similarity(tokens, other))
        documents += [
            Document(join(one, chinese), "f", f"{number}.{k}")
            for k, one in enumerate((tokens, other))
        ]
    found = find_near_duplicates(lambda: documents)
    dropped = set(found.survivor)
    for number, value in enumerate(similar):
        pair = {documents[2 * number].id, documents[2 * number + 1].id}
        if value >= 0.9:
            assert len(dropped & pair) == 1
        if value < 0.8:
            assert not dropped & pair
    for gone, kept in found.survivor.items():
        texts = {one.id: split_tokens(one.text) for one in documents}
        assert found.similarity[gone] == exact_similarity(texts[gone], texts[kept])
    assert sum(0.9 <= value < 1 for value in similar) > 3
    assert sum(value < 0.8 for value in similar) > 5


def family(seed=5):
    """Texts of which three are near copies, from two sources."""
    draw = random.Random(seed)
    tokens = write(draw, 200, False)
    texts = [tokens, [*tokens, "more"], [*tokens, "still", "more"]]
    documents = [Document(join(one, False), name) for one, name in zip(texts, "abc", strict=True)]
    return documents + [Document(join(write(draw, 80, False), False), "a") for _ in range(5)]


def test_who_survives_is_stated_and_does_not_depend_on_the_order():
    documents = family()
    longest = find_near_duplicates(lambda: documents)
    assert longest.survivor == dict.fromkeys((documents[0].id, documents[1].id), documents[2].id)
    preferred = find_near_duplicates(lambda: documents, DedupConfig(source_order=("b", "a")))
    assert set(preferred.survivor.values()) == {documents[1].id}
    for seed in range(3):
        shuffled = list(documents)
        random.Random(seed).shuffle(shuffled)
        assert find_near_duplicates(lambda again=shuffled: again) == longest
    judged = longest.judge(documents[0], 0.8)
    assert isinstance(judged, Drop)
    assert (judged.rule, judged.bound) == ("near_duplicate", 0.8)
    assert longest.judge(documents[2], 0.8) is documents[2]


def test_among_equally_long_texts_their_place_does_not_decide():
    tokens = write(random.Random(2), 200, False)
    texts = [join([*tokens, word], False) for word in ("one", "two", "six")]
    smallest = min(texts, key=lambda text: first_half(text))
    for number in range(12):
        documents = [Document(text, f"{number}/{at}") for at, text in enumerate(texts)]
        by_id = {one.id: one.text for one in documents}
        found = find_near_duplicates(lambda given=documents: given)
        assert {by_id[id] for id in found.survivor.values()} == {smallest}


def first_half(text):
    """The number that a text's 128-bit BLAKE2b begins with."""
    digest = blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], sys.byteorder)


def test_sketches_of_shards_make_those_of_the_whole():
    documents = family()
    hasher = MinHasher(DedupConfig())
    parts = [read_sketches(documents[:3], hasher), read_sketches(documents[3:], hasher)]
    found = find_near_duplicates(lambda: documents, sketches=lambda: parts)
    assert found == find_near_duplicates(lambda: documents)
    assert found.place == {documents[0].id: 0, documents[1].id: 1}


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_keys_sorted_in_files_give_the_same(tmp_path, threshold):
    """Many families and mapped sketches, against all in memory."""
    documents = [one for seed in range(30) for one in family(seed)]
    random.Random(1).shuffle(documents)
    config = DedupConfig(threshold=threshold)
    plain = find_near_duplicates(lambda: documents, config)
    assert len(plain.survivor) == 60
    parts = []
    for number, first in enumerate(range(0, len(documents), 50)):
        made = read_sketches(documents[first : first + 50], MinHasher(config))
        arrays = []
        for name in ("keys", "sources", "sizes", "texts", "ids"):
            path = tmp_path / f"{number}.{name}.npy"
            np.save(path, np.asfortranarray(getattr(made, name)))
            arrays.append(np.load(path, mmap_mode="r"))
        parts.append(Sketches(*arrays))
    found = find_near_duplicates(
        lambda: documents, config, sketches=lambda: parts, work_dir=tmp_path, bound_bytes=100
    )
    assert found == plain
    assert all(documents[place].id == name for name, place in found.place.items())
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".npy"]


def test_earlier_corpora_are_never_dropped_but_drop(tmp_path):
    documents = family()
    assert write_index(tmp_path / "old", documents[:1]) == 1
    found = find_near_duplicates(lambda: documents[1:], index_folders=[tmp_path / "old"])
    assert found.survivor == dict.fromkeys((documents[1].id, documents[2].id), documents[0].id)
    with pytest.raises(ConfigError, match="settings of the index"):
        find_near_duplicates(
            lambda: documents, DedupConfig(threshold=0.7), index_folders=[tmp_path / "old"]
        )
    with pytest.raises(ConfigError, match="already"):
        write_index(tmp_path / "old", documents)
    (tmp_path / "old" / "shingles.bin").write_bytes(b"")
    with pytest.raises(DataError, match="truncated"):
        find_near_duplicates(lambda: documents, index_folders=[tmp_path / "old"])


def test_texts_without_words_are_no_duplicates():
    documents = [Document(text, "f", str(i)) for i, text in enumerate(["", "", "...", "a", "a b"])]
    assert not find_near_duplicates(lambda: documents).survivor
    assert jaccard(*(hash_shingles("", 5) for _ in range(2))) == 0


def test_without_comparison_all_that_share_a_band_are_one():
    documents = family()
    found = find_near_duplicates(lambda: documents, DedupConfig(verify=False))
    assert set(found.survivor) == {documents[0].id, documents[1].id}
    assert found.compared == 0


def test_clusters_are_those_of_a_plain_search():
    draw = random.Random(1)
    pairs = [(draw.randrange(60), draw.randrange(60)) for _ in range(50)]
    clusters = Clusters(60)
    groups = [{number} for number in range(60)]
    for first, second in pairs:
        clusters.join(first, second)
        one, other = (next(g for g in groups if n in g) for n in (first, second))
        if one is not other:
            groups.remove(other)
            one |= other
    expected = {number: min(group) for group in groups for number in group}
    assert [clusters.find(number) for number in range(60)] == [expected[n] for n in range(60)]
    assert dict(zip(*(a.tolist() for a in clusters.members()), strict=True)) == {
        n: root for n, root in expected.items() if n != root
    }


def test_a_large_group_is_compared_in_linear_time():
    calls = []

    def similar(first, second):
        calls.append((first, second))
        return False

    join_group(Clusters(2000), range(2000), similar)
    assert len(calls) <= 2000 * 128
    clusters = Clusters(2000)
    join_group(clusters, range(2000), lambda first, second: True)
    assert {clusters.find(number) for number in range(2000)} == {0}


def test_copies_of_whole_texts():
    documents = [Document(text, name) for name, text in zip("abcd", "xyxx", strict=True)]
    found = find_copies(documents, DedupConfig(source_order=("c",)))
    assert found == dict.fromkeys((documents[0].id, documents[3].id), documents[2].id)
    assert find_copies(documents[::-1]) == find_copies(documents)


def test_repeated_paragraphs(tmp_path):
    long, other = "a paragraph of some length " * 3, "another paragraph, of its own " * 3
    texts = [f"{long}\n\nshort\n\n{other}", f"short\n\n{long}", f"{other}\n\n{other}\n\nend" * 2]
    documents = [Document(text, "f", str(i)) for i, text in enumerate(texts)]
    found = find_repeated_paragraphs(lambda: documents)
    assert found == find_repeated_paragraphs(lambda: documents[::-1])
    by_files = find_repeated_numbers(documents, 50, tmp_path, bound_bytes=0)
    numbers = [found.get(document.id, []) for document in documents]
    assert [list(part) for part in by_files] == numbers
    left = [cut_paragraphs(one.text, found.get(one.id, ())) for one in documents]
    for part in (long, other):
        assert sum(text.split("\n\n").count(part) for text in left) == 1
    assert sum(text.split("\n\n").count("short") for text in left) == 2


def plain_spans(texts, n):
    """Every run against every earlier one: covered tokens of each text."""
    runs = [(d, i, tuple(t[i : i + n])) for d, t in enumerate(texts) for i in range(len(t) - n + 1)]
    covered = [set() for _ in texts]
    for number, (d, i, run) in enumerate(runs):
        if any(run == earlier for _, _, earlier in runs[:number]):
            covered[d] |= set(range(i, i + n))
    return covered


@pytest.mark.parametrize("chinese", [False, True])
@pytest.mark.parametrize("is_small", [False, True])
def test_repeated_spans_are_those_of_a_quadratic_search(chinese, is_small, tmp_path, monkeypatch):
    if is_small:  # several batches, slices and ranges
        monkeypatch.setattr(spans, "_BATCH", 64)
        monkeypatch.setattr(spans, "_SLICE_BYTES", 32)
        monkeypatch.setattr(spans, "_READ_ENTRIES", 3)
        monkeypatch.setattr(files, "_SMALLEST_RANGE", 7)
    draw = random.Random(7)
    shared = write(draw, 40, chinese)
    texts = []
    for _ in range(6):
        own = write(draw, 60, chinese)
        at, size = draw.randrange(60), draw.randrange(8, 40)
        texts.append(own[:at] + shared[:size] + own[at:])
    texts.append(texts[0][10:30] * 2)
    documents = [Document(join(t, chinese), "f", str(i)) for i, t in enumerate(texts)]
    found = find_repeated_spans(lambda: documents, min_tokens=10, work_dir=tmp_path)
    for document, tokens, covered in zip(documents, texts, plain_spans(texts, 10), strict=True):
        left = [token for number, token in enumerate(tokens) if number not in covered]
        assert split_tokens(cut_spans(document.text, found.get(document.id, []))) == left
    assert len(found) > 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("find", [find_repeated_runs, find_repeated_numbers])
def test_memory_does_not_grow_with_the_repeats(find, tmp_path, monkeypatch):
    """Each document repeats the second half of the one before it."""
    monkeypatch.setattr(spans, "_BATCH", 1 << 10)
    monkeypatch.setattr(spans, "_READ_ENTRIES", 1 << 8)
    monkeypatch.setattr(files, "_SMALLEST_RANGE", 1 << 10)
    monkeypatch.setattr(exact, "_BATCH", 64)
    options = {} if find is find_repeated_runs else {"bound_bytes": 1 << 12}

    def write_documents(count):
        draw, last = random.Random(0), ""
        for number in range(count):
            half = " ".join(draw.choices(WORDS, k=40))
            yield Document(f"{last}\n\n{half}", "f", str(number))
            last = half

    def measure(count):
        tracemalloc.start()
        found = find(write_documents(count), 20, tmp_path / str(count), **options)
        num_repeated = sum(map(len, found))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        shutil.rmtree(tmp_path / str(count))
        return num_repeated, peak

    measure(800)  # fills the caches
    (few, small), (many, large) = measure(200), measure(800)
    assert (few, many) == ((199, 799) if options else (21 * 199, 21 * 799))
    assert large < 1.5 * small


EXAMPLE = (
    "Which of the following rivers runs through the largest number of countries in Europe today?"
)
POEM = "秦川雄帝宅，函谷壯皇居。綺殿千尋起，離宮百雉餘。連甍遙接漢，飛觀迥凌虛。"


def test_planted_examples_are_found_and_nothing_else(tmp_path):
    path = tmp_path / "quiz.jsonl"
    rows = [{"q": EXAMPLE, "a": ["the Danube"]}, {"q": POEM}]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    index = OverlapIndex(examples_of(path))
    assert index.names == ["quiz:1.q", "quiz:2.q"]
    assert index.too_short == 1
    draw = random.Random(0)
    filler = join(write(draw, 100, False), False)
    sound = Document(f"{filler} Which of the following rivers runs through it? {POEM[:20]}", "f")
    assert find_overlap(sound.text, index) == []
    planted = f"{filler}\n{EXAMPLE.upper()}\n{filler}"
    [hit] = find_overlap(planted, index)
    assert (hit.example, planted[hit.start : hit.end]) == ("quiz:1.q", EXAMPLE.upper()[:-1])
    judge, cut = Decontaminate(index), Decontaminate(index, cut=True)
    dropped = judge(Document(f"前言。{POEM}", "f"))
    assert (dropped.rule, dropped.value, dropped.excerpt) == ("test_example", "quiz:2.q", POEM[:-1])
    assert judge(sound) is sound
    assert cut(Document(planted, "f")).text == f"{filler}\n?\n{filler}"


def test_a_short_example_counts_as_a_whole():
    index = OverlapIndex([("short", "one two three four five six seven eight nine")])
    assert find_overlap("so one two three four five six seven eight nine, and", index)
    assert not find_overlap("one two three four five six seven eight ten", index)


@pytest.mark.parametrize("values", [{"threshold": 0.1}, {"threshold": 1.1}, {"ngram": 0}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        DedupConfig(**values)
    with pytest.raises(ConfigError, match="min_tokens"):
        find_repeated_spans(list, min_tokens=1)
