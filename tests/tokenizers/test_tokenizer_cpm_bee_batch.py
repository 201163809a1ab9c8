"""Rows of packed instances and questions against the rules of CPM-Bee, written out plainly."""

from __future__ import annotations

import numpy as np
import pytest
from bee_vocabulary import golden_tokenizer, small_tokenizer

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.cpm_bee.batch import BestFit, build_instance, collate_rows
from bmforge.tokenizers.cpm_bee.document import encode_document
from bmforge.tokenizers.cpm_bee.prompt import collate_prompts, encode_prompt

MAIN = {"input": "今天<mask_1>é<mask_0>", "<ans>": {"<mask_0>": "é很好", "<mask_1>": "<mask_0>"}}
EXAMPLE = {"input": "天气<mask_0>è", "<ans>": {"<mask_0>": "è"}}
OTHER = {"<ans>": "好吃", "input": "è"}
CHOICE = {"input": "a", "options": {"<option_0>": "b", "<option_1>": "c"}, "<ans>": ""}


def plain_labels(inputs, tokenizer):
    """The published rule on whole rows: what stands at j is the target at j - 1."""
    rows = list(
        zip(inputs["ext_table_ids"].tolist(), inputs["ext_table_sub"].tolist(), strict=True)
    )
    labels = np.full(inputs["input"].shape, -100)
    for i, length in enumerate(inputs["length"]):
        for j in range(1, length):
            if inputs["context"][i, j - 1]:
                continue
            token, sub = int(inputs["input"][i, j]), int(inputs["input_sub"][i, j])
            if token == tokenizer.bos_id:
                labels[i, j - 1] = tokenizer.eos_id
            elif sub:
                labels[i, j - 1] = len(tokenizer) + rows.index((token, sub))
            else:
                labels[i, j - 1] = token
        if not inputs["context"][i, length - 1]:
            labels[i, length - 1] = tokenizer.eos_id
    return labels


def test_labels_of_the_published_table():
    tokenizer = golden_tokenizer()
    document = {"input": "今天天气是真的<mask_0>", "<ans>": {"<mask_0>": "好"}}
    inputs = collate_rows([[build_instance(document, tokenizer)]], tokenizer).inputs
    assert inputs["labels"].tolist() == [[-100] * 19 + [832, 7]]


def test_rows_have_what_the_model_takes():
    tokenizer = small_tokenizer()
    rows = [
        [
            build_instance(MAIN, tokenizer, [EXAMPLE], task="blanks"),
            build_instance(OTHER, tokenizer),
        ],
        [build_instance(OTHER, tokenizer, task="other")],
    ]
    batch = collate_rows(rows, tokenizer, 90)
    inputs = batch.inputs
    assert {name: (values.dtype.name, values.ndim) for name, values in inputs.items()} == {
        **dict.fromkeys(
            ("input", "input_sub", "sample_ids", "num_segments", "segment", "segment_rel_offset",
             "segment_rel", "span"), ("int32", 2),
        ),
        "context": ("bool", 2), "labels": ("int64", 2), "length": ("int32", 1),
        "ext_table_ids": ("int32", 1), "ext_table_sub": ("int32", 1),
    }  # fmt: skip
    np.testing.assert_array_equal(inputs["labels"], plain_labels(inputs, tokenizer))
    first, second = len(rows[0][0]), len(rows[0][1])
    assert inputs["length"].tolist() == [first + second, second]
    assert inputs["span"][0].tolist() == [0] * first + [1] * second + [0] * (90 - first - second)
    assert batch.tasks == ("blanks", "", "other")
    assert batch.task_ids[0, [0, first]].tolist() == [0, 1]
    assert (inputs["num_segments"][1, second:] == 0).all()
    ext = list(zip(inputs["ext_table_ids"].tolist(), inputs["ext_table_sub"].tolist(), strict=True))
    mask, unk = tokenizer.mask_id, tokenizer.unk_id
    assert ext == [(mask, 1), (unk, 1)]  # <mask_0> came second; è in the example came after é


def test_every_token_finds_its_own_relations():
    tokenizer = small_tokenizer()
    main = encode_document(MAIN, tokenizer)
    example = encode_document(EXAMPLE, tokenizer, extension=main.extension)
    other = encode_document(OTHER, tokenizer)
    row = [build_instance(MAIN, tokenizer, [EXAMPLE]), build_instance(OTHER, tokenizer)]
    inputs = {name: values[0] for name, values in collate_rows([row], tokenizer).inputs.items()}
    start = 0
    for number, document in enumerate((main, example, other)):
        here = slice(start, start + len(document.ids))
        assert inputs["input"][here].tolist() == document.ids.tolist()
        assert inputs["sample_ids"][here].tolist() == [number % 2] * len(document.ids)
        q, k = inputs["segment"][here, None], inputs["segment"][None, here]
        size, offset = inputs["num_segments"][here, None], inputs["segment_rel_offset"][here, None]
        square = document.segment_rel.reshape(document.n_segments, -1)
        np.testing.assert_array_equal(
            inputs["segment_rel"][q * size + k + offset], square[document.segs][:, document.segs]
        )
        start = here.stop
    examples = inputs["sample_ids"] == 1
    assert inputs["context"][examples].all()
    assert (inputs["labels"][examples] == -100).all()


def test_a_row_without_extension_has_the_placeholder():
    tokenizer = small_tokenizer()
    inputs = collate_rows([[build_instance({"<ans>": "a"}, tokenizer)]], tokenizer).inputs
    assert inputs["ext_table_ids"].tolist() == [0]
    assert inputs["ext_table_sub"].tolist() == [1]


def test_examples_stop_at_the_window():
    tokenizer = small_tokenizer()
    main = len(build_instance(MAIN, tokenizer))
    example = len(build_instance(MAIN, tokenizer, [EXAMPLE])) - main
    full = build_instance(MAIN, tokenizer, [EXAMPLE] * 5, max_length=main + 2 * example)
    assert len(full) == main + 2 * example
    assert full.sample_ids.max() == 2
    assert build_instance(MAIN, tokenizer, [EXAMPLE], max_length=main).sample_ids.max() == 0
    with pytest.raises(DataError, match="a packed sequence has"):
        collate_rows([[full]], tokenizer, main)


def test_best_fit_against_a_plain_search():
    lengths = np.random.default_rng(0).integers(1, 100, 300).tolist()
    packer = BestFit(100)
    rows: list[list[int]] = []
    for item, length in enumerate(lengths):
        packer.add(item, length)
        rooms = [100 - sum(lengths[i] for i in row) for row in rows]
        best = None
        for i, room in enumerate(rooms):
            if length <= room and (best is None or room < rooms[best]):
                best = i
        if best is None:
            rows.append([item])
        else:
            rows[best].append(item)
    assert packer.rows == rows
    assert packer.take(2) == rows[:2]
    assert packer.rows == rows[2:]
    packer.add(300, 100)
    assert packer.rows[-1] == [300]
    with pytest.raises(DataError, match="max_length=100"):
        packer.add(301, 101)


def test_questions_side_by_side():
    tokenizer = small_tokenizer()
    prompts = [encode_prompt(MAIN, tokenizer), encode_prompt(CHOICE, tokenizer, [EXAMPLE, OTHER])]
    batch = collate_prompts(prompts, tokenizer)
    inputs = batch.inputs
    assert sorted(inputs) == sorted([
        "input", "input_sub", "position", "context", "sample_ids", "num_segments", "segment",
        "segment_rel_offset", "segment_rel", "ext_table_ids", "ext_table_sub",
    ])  # fmt: skip
    for i, prompt in enumerate(prompts):
        length = int(inputs["context"][i].sum())
        assert not inputs["context"][i, :-length].any()
        assert (inputs["num_segments"][i, :-length] == 0).all()
        assert inputs["position"][i, -length:].tolist() == list(range(length))
        encoded = encode_document(prompt.document, tokenizer, blank_answers=True)
        kept = encoded.context
        own = inputs["sample_ids"][i, -length:] == 0
        assert inputs["input"][i, -length:][own].tolist() == encoded.ids[kept].tolist()
        assert inputs["segment"][i, -length:][own].tolist() == encoded.segs[kept].tolist()
        assert prompt.num_segments == encoded.n_segments
    size, unk = len(tokenizer), tokenizer.unk_id
    ext = dict(enumerate(batch.ext_rows, size))
    names = [prompt.extension.names for prompt in prompts]
    for row in range(2):
        banned = set(batch.banned[row])
        assert {i for i, token in ext.items() if token not in names[row]} == banned - {
            tokenizer.pad_id, tokenizer.bos_id, unk
        }  # fmt: skip
    assert names[0][unk, 0] == "é"
    assert names[1][unk, 0] == "è"
    assert unk not in batch.banned[0] + batch.banned[1]


def test_a_choice_is_held_to_its_options():
    tokenizer = small_tokenizer()
    batch = collate_prompts([encode_prompt(CHOICE, tokenizer)], tokenizer)
    ((slot,),) = batch.allowed
    option = tokenizer.special_tokens["<option>"]
    assert slot == ((option, tokenizer.eos_id), (len(tokenizer), tokenizer.eos_id))
    answers = [batch.decode(0, [ids], tokenizer)["<ans>"] for ids in slot]
    assert answers == ["<option_0>", "<option_1>"]


def test_constraints_of_ones_own():
    tokenizer = small_tokenizer()
    document = {"input": "a𠮷", "<ans>": {"b": "", "c": ""}}
    prompt = encode_prompt(document, tokenizer, constraints={("c",): ["好吃", "𠮷"]})
    batch = collate_prompts([prompt], tokenizer)
    assert batch.allowed[0][0] is None
    written = [batch.decode(0, [[], ids], tokenizer)["<ans>"] for ids in batch.allowed[0][1]]
    assert written == [{"b": "", "c": "好吃"}, {"b": "", "c": "𠮷"}]
    with pytest.raises(DataError, match="'é', which is neither in the vocabulary"):
        encode_prompt(document, tokenizer, constraints={("c",): ["é"]})
    with pytest.raises(ConfigError, match="contains the unknown answer slots"):
        encode_prompt(document, tokenizer, constraints={("d",): ["a"]})
    for nothing in ([], "ab"):
        with pytest.raises(ConfigError, match="a non-empty list of strings"):
            encode_prompt(document, tokenizer, constraints={("c",): nothing})


def test_questions_longer_than_the_window():
    tokenizer = small_tokenizer()
    length = len(encode_prompt(CHOICE, tokenizer).instance)
    with pytest.raises(DataError, match="1 examples have"):
        encode_prompt(CHOICE, tokenizer, [EXAMPLE], max_length=length + 1)
