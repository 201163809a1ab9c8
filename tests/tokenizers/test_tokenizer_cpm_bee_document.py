"""CPM-Bee's documents against the published table and a second, plain way to relate segments."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from bee_vocabulary import golden_tokenizer, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import DataError
from bmforge.tokenizers.cpm_bee.document import (
    TooLongError,
    decode_document,
    encode_document,
)

GOLDEN = {"input": "今天天气是真的<mask_0>", "<ans>": {"<mask_0>": "好"}}
GOLDEN_RELATIONS = [
    [0, 2, 3, 2, 3, 4],
    [9, 0, 2, 10, 11, 12],
    [17, 9, 0, 18, 19, 20],
    [9, 10, 11, 0, 2, 3],
    [17, 18, 19, 9, 0, 2],
    [25, 26, 27, 17, 9, 0],
]


def test_published_table():
    encoded = encode_document(GOLDEN, golden_tokenizer())
    assert encoded.ids.tolist() == [
        6, 8, 7, 6, 65678, 7, 6, 9803, 14963, 1730, 23974, 2, 7, 6, 9, 7, 6, 2, 7, 6, 832,
    ]  # fmt: skip
    assert encoded.subs.tolist() == [0] * 21
    assert encoded.context.tolist() == [1] * 19 + [0, 0]
    assert encoded.segs.tolist() == [0] * 3 + [1] * 3 + [2] * 7 + [3] * 3 + [4] * 3 + [5] * 2
    assert encoded.n_segments == 6
    assert encoded.segment_rel.reshape(6, 6).tolist() == GOLDEN_RELATIONS
    assert encoded.ext_table == {86583: "<mask_0>"}
    (slot,) = encoded.answers
    assert slot == (("<mask_0>",), 5, 19, 21)


def leaves_and_keys(data, place=(), key=None):
    """Places of all segments, depth first: a place is the child number at every step."""
    places = [place]
    if isinstance(data, dict):
        for i, value in enumerate(data.values()):
            places += leaves_and_keys(value, (*place, i))
    elif data is not None:
        places.append((*place, 0))
    return places


def plain_relations(document, max_depth=8):
    places = leaves_and_keys(document)
    rows = []
    for a in places:
        for b in places:
            shared = 0
            while shared < min(len(a), len(b)) and a[shared] == b[shared]:
                shared += 1
            up = min(len(a) - shared, max_depth - 1)
            down = min(len(b) - shared, max_depth - 1)
            rows.append(0 if up == down == 0 else up * max_depth + down + 1)
    return rows


TREES = st.recursive(
    st.just("a"), lambda inner: st.dictionaries(st.text("abcd", max_size=2), inner), max_leaves=12
)


@given(st.dictionaries(st.sampled_from(["input", "b", "c"]), TREES), st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_relations_against_a_plain_second_way(document, max_depth):
    document = {**document, "<ans>": {"x": "a", "y": {"z": ""}}}
    encoded = encode_document(document, small_tokenizer(), max_depth=max_depth)
    assert encoded.segment_rel.tolist() == plain_relations(document, max_depth)


def nest(levels: int):
    data: object = "a"
    for _ in range(levels):
        data = {"a": data}
    return data


def test_deep_documents_are_clipped_then_refused():
    tokenizer = small_tokenizer()
    document = {"input": nest(12), "<ans>": ""}
    encoded = encode_document(document, tokenizer)
    assert encoded.segment_rel.tolist() == plain_relations(document)
    assert encoded.segment_rel.max() <= 7 * 8 + 7 + 1
    for levels in (16, 5000):
        with pytest.raises(DataError, match=r"nested deeper than max_nesting=16 at input\.a"):
            encode_document({"input": nest(levels), "<ans>": ""}, tokenizer)
    loop: dict[str, object] = {"<ans>": ""}
    loop["input"] = loop
    with pytest.raises(DataError, match="nested deeper"):
        encode_document(loop, tokenizer)


def test_sub_ids_count_by_base_in_order_of_appearance():
    tokenizer = small_tokenizer()
    document = {
        "input": "<mask_7>é<mask_2>今è<mask_7>",
        "options": {"<option_4>": "a", "<option_0>": "é"},
        "<ans>": {"<mask_2>": "è", "<mask_7>": "<option_0>"},
    }
    encoded = encode_document(document, tokenizer)
    extended = {
        name: token for token, name in encoded.extension.names.items()
    }  # the base id and number of every token beyond the vocabulary
    mask, unk, option = (tokenizer.special_tokens[t] for t in ("<mask>", "<unk>", "<option>"))
    assert extended == {
        "<mask_7>": (mask, 0), "<mask_2>": (mask, 1), "é": (unk, 0), "è": (unk, 1),
        "<option_4>": (option, 0), "<option_0>": (option, 1),
    }  # fmt: skip
    text = encoded.segs == 2
    assert encoded.subs[text].tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    assert encoded.ids.max() < len(tokenizer)


README = [
    {"input": "今天天气很好，<mask>", "prompt": "往后写两句话", "<ans>": ""},
    {"input": "今天天气很好", "prompt": "中翻英", "<ans>": ""},
    {"input": "好吃", "question": "评分是多少？(1-5)", "<ans>": ""},
    {"input": "a", "options": {"<option_0>": "b", "<option_1>": "c"}, "question": "?", "<ans>": ""},
    {"input": "今天<mask_0>很<mask_1>", "<ans>": {"<mask_0>": "", "<mask_1>": ""}},
    {"input": "今天<mask>", "<ans>": {"<mask>": ""}},
    {"input": "在司法部工作的小楠", "<ans>": {"人名": "", "地名": "", "a": {"b": ""}}},
]


@pytest.mark.parametrize("document", README)
def test_answers_go_back_into_a_copy(document):
    tokenizer = small_tokenizer()
    before = copy.deepcopy(document)
    encoded = encode_document(document, tokenizer, blank_answers=True)
    words = [f"好{i}" for i in range(len(encoded.answers))]
    written = [[*tokenizer.encode(word), tokenizer.eos_id] for word in words]
    filled = decode_document(document, encoded, written, tokenizer)
    assert document == before
    assert {k: v for k, v in filled.items() if k != "<ans>"} == {
        k: v for k, v in document.items() if k != "<ans>"
    }
    for slot, word in zip(encoded.answers, words, strict=True):
        value = filled["<ans>"]
        for key in slot.path:
            value = value[key]
        assert value == word
        assert encoded.ids[slot.start] == tokenizer.bos_id
        assert not encoded.context[slot.start : slot.stop].any()
    assert (~encoded.context).sum() == len(encoded.answers)


def test_extended_answers_and_answers_not_reached():
    tokenizer = small_tokenizer()
    document = {"input": "é<mask_0>è", "<ans>": {"<mask_0>": "", "a": ""}}
    encoded = encode_document(document, tokenizer)
    rows = [(tokenizer.unk_id, 3), (tokenizer.unk_id, 1)]
    size = len(tokenizer)
    written = [[tokenizer.unk_id, size + 1, tokenizer.mask_id], None]
    filled = decode_document(document, encoded, written, tokenizer, rows)
    assert filled["<ans>"] == {"<mask_0>": "éè<mask_0>", "a": None}
    for bad, message in ((size, "another document"), (size + 2, "is out of range")):
        with pytest.raises(DataError, match=message):
            decode_document(document, encoded, [[bad], None], tokenizer, rows)
    with pytest.raises(DataError, match="has 1 entries, but the document has 2 answer slots"):
        decode_document(document, encoded, [[]], tokenizer)


def test_the_order_of_answer_keys_depends_on_the_key_alone():
    tokenizer = small_tokenizer()
    keys = list("abcdefgh")
    document = {"input": {"y": "a", "x": "b"}, "<ans>": {key: key for key in keys}}
    orders = set()
    for secret in (b"1", b"2", b"3"):
        encoded = encode_document(document, tokenizer, order_key=secret)
        again = encode_document(document, tokenizer, order_key=secret)
        np.testing.assert_array_equal(encoded.ids, again.ids)
        order = [slot.path[0] for slot in encoded.answers]
        assert sorted(order) == keys
        for slot in encoded.answers:
            text = tokenizer.decode(encoded.ids[slot.start + 1 : slot.stop].tolist())
            assert (text,) == slot.path
        orders.add(tuple(order))
    assert len(orders) == 3
    plain = encode_document(document, tokenizer)
    assert [slot.path[0] for slot in plain.answers] == keys


BAD = [
    ({"input": "a"}, r"has no '<ans>'"),
    ({}, r"has no '<ans>'"),
    ({"a": {"<ans>": ""}}, r"has no '<ans>'"),
    ({"input": "a", "<ans>": {}}, "has no slot for an answer"),
    ({"input": "a", "<ans>": None}, "at <ans> is None"),
    ({"input": 3, "<ans>": ""}, "at input is 3 of type int"),
    ({"input": ["a"], "<ans>": ""}, "lists as dicts"),
    ({3: "a", "<ans>": ""}, "key 3 at .* must be a string"),
    ({"input": "<mask_0>", "<ans>": {"<mask_1>": ""}}, r"<ans>\.<mask_1> has no blank"),
    ({"input": "a", "<ans>": {"<mask_0>": ""}}, "blanks: none"),
    ({"input": "a", "<ans>": {"b": {"<option_0>": ""}}}, "has no blank"),
    ({"input": "a<masc_0>", "<ans>": ""}, r"unknown special token <masc_0>.*mean '<mask>'"),
    ({"<foo>": "a", "<ans>": ""}, "unknown special token <foo>"),
    ({"input": "a</s>b", "<ans>": ""}, "</s> marks the beginning or end"),
    ({"input": "1 < 2", "<ans>": ""}, "at input is not valid: the '<' at character 2"),
    ({"input": "a", "<ans>": "a𠮷"}, r"contains '𠮷', which is neither in the vocabulary"),
    ({"input": "a", "<ans>": {"b": "<option_3>"}}, "contains '<option_3>'"),
    ("text", "a document must be a dict"),
]


@pytest.mark.parametrize(("document", "message"), BAD)
def test_bad_documents(document, message):
    with pytest.raises(DataError, match=message):
        encode_document(document, small_tokenizer())


def test_the_window():
    tokenizer = small_tokenizer()
    document = {"input": "a" * 20, "<ans>": "b"}
    tokens = len(encode_document(document, tokenizer).ids)
    assert len(encode_document(document, tokenizer, max_length=tokens).ids) == tokens
    with pytest.raises(TooLongError, match=rf"has {tokens} tokens.*max_length={tokens - 1}"):
        encode_document(document, tokenizer, max_length=tokens - 1)
    assert issubclass(TooLongError, DataError)


def test_a_question_may_hold_any_answer():
    document = {"input": "a", "<ans>": {"b": "𠮷", "c": None}}
    encoded = encode_document(document, small_tokenizer(), blank_answers=True)
    assert not encoded.ext_table
    assert [slot.stop - slot.start for slot in encoded.answers] == [1, 1]
