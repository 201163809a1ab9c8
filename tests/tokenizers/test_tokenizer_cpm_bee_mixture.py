"""Task mixtures and their loader: shares, purity, resuming, world sizes, bad files."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from bee_vocabulary import small_tokenizer

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.cpm_bee.batch import build_instance
from bmforge.tokenizers.cpm_bee.loader import DocumentLoader, iter_documents
from bmforge.tokenizers.cpm_bee.mixture import DocumentFile, TaskMixture, TaskSource, load_mixture


def documents(count, name="a", longest=12):
    generator = np.random.default_rng(count)
    return [
        {"input": name * int(generator.integers(1, longest)), "<ans>": {"a": str(i), "b": "c"}}
        for i in range(count)
    ]


def mixture(max_length=64, seed=3, **options):
    sources = [
        TaskSource("many", documents(30), example_weights=[2, 1, 1]),
        TaskSource("twice", documents(7, "b"), weight=2.5, example_weights=[0, 1]),
        TaskSource("few", documents(10, "c"), weight=0.3),
    ]
    return TaskMixture(sources, small_tokenizer(), max_length, seed=seed, **options)


def test_an_epoch_has_every_source_in_its_share():
    mixed = mixture()
    assert mixed.samples_per_epoch == 30 + round(17.5) + 3
    for epoch in range(4):
        numbers = range(epoch * mixed.samples_per_epoch, (epoch + 1) * mixed.samples_per_epoch)
        seen = [mixed.locate(number) for number in numbers]
        assert Counter(source for source, _ in seen) == {0: 30, 1: 18, 2: 3}
        assert sorted(line for source, line in seen if source == 0) == list(range(30))
    total = [mixed.locate(number) for number in range(10 * mixed.samples_per_epoch)]
    for source, size in ((1, 7), (2, 10)):
        lines = [line for where, line in total if where == source]
        for start in range(0, len(lines) - size + 1, size):
            assert sorted(lines[start : start + size]) == list(range(size))
    assert [mixed.locate(i) for i in range(51)] != [mixed.locate(51 + i) for i in range(51)]


def test_a_sample_depends_on_seed_and_number_alone():
    forward, backward, other = mixture(), mixture(), mixture(seed=4)
    ahead = [forward.instance(number) for number in range(130)]
    behind = [backward.instance(number) for number in reversed(range(130))][::-1]
    for one, two in zip(ahead, behind, strict=True):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.sample_ids, two.sample_ids)
    assert any(
        len(one) != len(two.ids)
        for one, two in zip(ahead, map(other.instance, range(130)), strict=True)
    )


def test_examples_follow_their_weights_and_are_never_the_sample_itself():
    mixed = mixture(max_length=1000)
    counts: dict[str, Counter[int]] = {}
    for number in range(1500):
        instance = mixed.instance(number)
        counts.setdefault(instance.task, Counter())[int(instance.sample_ids.max())] += 1
    assert set(counts["few"]) == {0}
    assert set(counts["twice"]) == {1}
    share = [counts["many"][i] / counts["many"].total() for i in range(3)]
    np.testing.assert_allclose(share, [0.5, 0.25, 0.25], atol=0.05)
    lone = TaskSource("lone", documents(2), example_weights=[0, 0, 1])
    pair = TaskMixture([lone], small_tokenizer(), 1000)
    for number in range(20):
        instance = pair.instance(number)
        parts = [instance.ids[instance.sample_ids == i].tolist() for i in range(3)]
        assert parts[1] != parts[0]


def test_long_documents_are_left_out_and_bad_ones_named():
    tokenizer = small_tokenizer()
    good, bad = documents(5), [{"input": "𠮷", "<ans>": "é"}]
    long = [{"input": "a" * 200, "<ans>": ""}]
    mixed = TaskMixture([TaskSource("x", good + long)], tokenizer, 64)
    made = [mixed.instance(number) for number in range(6)]
    assert sum(instance is None for instance in made) == len(mixed.skipped) == 1
    with pytest.raises(DataError, match=r"task 'x', document 5 .*cannot be generated"):
        list(map(TaskMixture([TaskSource("x", good + bad)], tokenizer, 64).instance, range(6)))
    lenient = TaskMixture([TaskSource("x", good + bad)], tokenizer, 64, skip_bad=True)
    assert sum(lenient.instance(number) is None for number in range(6)) == 1
    loader = DocumentLoader(
        TaskMixture([TaskSource("x", long)], tokenizer, 64),
        global_batch_size=1, micro_batch_size=1,
    )  # fmt: skip
    with pytest.raises(DataError, match="all 1 samples of an epoch were skipped"):
        next(loader)


def same(one, two):
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        assert all(bool((left[key] == right[key]).all()) for key in left)


def loader(world=1, rank=0, micro=2, seed=3, max_length=100):
    return DocumentLoader(
        mixture(max_length, seed),
        global_batch_size=4,
        micro_batch_size=micro,
        rank=rank,
        world=world,
    )


def test_a_loader_goes_on_where_it_stopped():
    run = loader()
    for step in range(8):
        state = json.loads(json.dumps(run.state_dict()))
        resumed = loader()
        resumed.load_state_dict(state)
        wanted = next(run)
        same(next(resumed), wanted)
        assert state["step"] == step
        assert wanted[0]["input"].shape == (2, 100)
    assert run.state_dict() == resumed.state_dict()


def test_rows_do_not_depend_on_the_world_size():
    alone = loader(micro=4)
    pair = [loader(world=2, rank=rank, micro=2) for rank in range(2)]
    singles = [loader(world=2, rank=rank, micro=1) for rank in range(2)]
    for _ in range(4):
        (whole,) = next(alone)
        parts = [next(one)[0]["input"] for one in pair]
        assert whole["input"].tolist() == [row for part in parts for row in part.tolist()]
        left, right = (next(one) for one in singles)
        slots = [left[0], right[0], left[1], right[1]]
        assert whole["input"].tolist() == [slot["input"][0].tolist() for slot in slots]
    assert alone.state_dict() == pair[1].state_dict() == singles[0].state_dict()


def test_every_sample_comes_once():
    run, seen = loader(), Counter()
    while run.state_dict()["samples"] < 3 * run.mixture.samples_per_epoch:
        before = run.state_dict()
        taken = [n for row in before["open_rows"] for n in row]
        next(run)
        after = run.state_dict()
        kept = {n for row in after["open_rows"] for n in row}
        seen.update(
            n for n in (*taken, *range(before["samples"], after["samples"])) if n not in kept
        )
    assert set(seen.values()) == {1}
    left = {n for row in run.state_dict()["open_rows"] for n in row}
    assert set(seen) | left == set(range(run.state_dict()["samples"]))


def test_states_of_another_run_are_refused():
    state = loader().state_dict()
    for other, word in ((loader(seed=4), "seed"), (loader(max_length=90), "dataset")):
        with pytest.raises(ConfigError, match=f"loader state has {word}="):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match="lacks"):
        loader().load_state_dict({"step": 1})


def test_sizes_that_do_not_fit():
    for options in ({"micro": 3}, {"world": 2, "rank": 2}, {"micro": 0}):
        with pytest.raises(ConfigError, match="micro_batch_size"):
            loader(**options)


def test_one_pass_has_every_document_once():
    tokenizer = small_tokenizer()
    given = documents(23)
    batches = list(iter_documents(given, tokenizer, max_length=100, batch_size=3, task="x"))
    lengths = sum(int(batch.inputs["length"].sum()) for batch in batches)
    assert lengths == sum(len(build_instance(document, tokenizer)) for document in given)
    assert all(len(batch.inputs["input"]) == 3 for batch in batches[:-1])
    spans = sum(
        int(row[:length].max()) + 1
        for batch in batches
        for row, length in zip(batch.inputs["span"], batch.inputs["length"], strict=True)
    )
    assert spans == 23


def test_mixture_files(tmp_path):
    lines = [json.dumps({"text": "今" * i, "label": "好"}, ensure_ascii=False) for i in range(1, 6)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n", "utf-8")
    entry = {
        "path": "a.jsonl", "task_name": "x", "dataset_name": "d", "weight": 2,
        "transforms": [{"input": "$text", "<ans>": "$label"}, {"doc": "$text", "<ans>": "$label"}],
        "incontext_weight": [1, 1],
    }  # fmt: skip
    (tmp_path / "mix.json").write_text(json.dumps([entry]), "utf-8")
    (source,) = load_mixture(tmp_path / "mix.json")
    assert source.samples_per_epoch == 10
    assert source.documents[4] == {"text": "今今今今今", "label": "好"}
    mixed = TaskMixture([source], small_tokenizer(), 200)
    tokenizer = small_tokenizer()
    keys = Counter()
    for number in range(60):
        instance = mixed.instance(number)
        texts = tokenizer.decode(instance.ids.tolist(), {})
        uses_input = "<s>input</s>" in texts
        assert uses_input != ("<s>doc</s>" in texts)  # one transform for sample and examples
        keys[uses_input] += 1
    assert min(keys.values()) > 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transforms": "script.py"}, "programs are not supported"),
        ({"transforms": ["script.py"]}, "programs are not supported"),
        ({"wieght": 1}, "Did you mean 'weight'"),
        ({"weight": 0}, "weight=0"),
        ({"incontext_weight": [0]}, "one of them must be above 0"),
        ({"path": 3}, "needs the string fields 'path' and 'task_name'"),
    ],
)
def test_bad_mixture_files(tmp_path, change, message):
    (tmp_path / "a.jsonl").write_text('{"<ans>": ""}\n')
    entry = {"path": "a.jsonl", "task_name": "x", **change}
    (tmp_path / "mix.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=message):
        load_mixture(tmp_path / "mix.json")


def test_bad_document_files(tmp_path):
    file = tmp_path / "a.jsonl"
    for content, message in (
        (b'{"a": "b"}\n\n[1]\n', "line 3 is a list"),
        (b"{\n", "line 1 is not JSON"),
        (b"\xff\n", "is not JSON"),
        (b"[" * 100_000 + b"\n", "is nested too deep"),
        (b'{"a": "b", "<ans>": {"c": "", "c": "d"}}\n', "line 1 has the key 'c' twice"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(DocumentFile(file))
    file.write_bytes(b"\n\n")
    with pytest.raises(DataError, match="contains no document"):
        DocumentFile(file)
    with pytest.raises(DataError, match="cannot read"):
        DocumentFile(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="must contain at least one TaskSource"):
        TaskMixture([], small_tokenizer(), 10)
    (tmp_path / "mix.json").write_text("{}")
    with pytest.raises(ConfigError, match="a list of objects"):
        load_mixture(tmp_path / "mix.json")
