"""Task shapes and what their answers may be; transforms of records."""

from __future__ import annotations

import pytest
from bee_vocabulary import small_tokenizer

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.cpm_bee import tasks
from bmforge.tokenizers.cpm_bee.document import encode_document
from bmforge.tokenizers.cpm_bee.transform import Transform

ONE_TO_FIVE = ("1", "2", "3", "4", "5")


def test_shapes_of_the_overview():
    assert tasks.generate_text("今天<mask>") == {
        "input": "今天<mask>", "prompt": "往后写两句话", "<ans>": "",
    }  # fmt: skip
    assert tasks.translate_text("好") == {"input": "好", "prompt": "中翻英", "<ans>": ""}
    assert tasks.rate_text("好吃", answer="4") == {
        "input": "好吃", "question": "评分是多少？(1-5)", "<ans>": "4",
    }  # fmt: skip
    assert tasks.choose_option("a", ["b", "c"], "?", 1) == {
        "input": "a", "options": {"<option_0>": "b", "<option_1>": "c"}, "question": "?",
        "<ans>": "<option_1>",
    }  # fmt: skip
    assert tasks.fill_blanks("<mask_1>a<<mask_3><mask_0><mask_1>")["<ans>"] == {
        "<mask_1>": "", "<mask_0>": "",
    }  # fmt: skip
    assert tasks.answer_question("a", "b", "c") == {"input": "a", "question": "b", "<ans>": "c"}
    assert tasks.extract_entities("a", ["人名", "地名"], {"地名": "b", "人名": "c"}) == {
        "input": "a", "<ans>": {"人名": "c", "地名": "b"},
    }  # fmt: skip


def test_every_shape_can_be_encoded():
    documents = [
        tasks.generate_text("今天<mask>"), tasks.translate_text("好"), tasks.rate_text("好吃"),
        tasks.choose_option("a", ["b", "c"], "?"), tasks.fill_blanks("a<mask>"),
        tasks.answer_question("a", "b"), tasks.extract_entities("a", ["b", "c"]),
    ]  # fmt: skip
    slots = [len(encode_document(document, small_tokenizer()).answers) for document in documents]
    assert slots == [1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("document", "allowed"),
    [
        ({"input": "a", "question": "评分是多少？(1-5)", "<ans>": ""}, ONE_TO_FIVE),
        ({"input": "a", "prompt": "打分（1～5）", "<ans>": ""}, ONE_TO_FIVE),
        ({"input": "a(1-5)", "question": "b", "<ans>": ""}, None),
        ({"input": "a", "question": "哪一年？(1990-2000)", "<ans>": ""}, None),
        ({"input": "a", "question": "写(10-50)个字", "<ans>": ""}, None),
        ({"input": "a", "question": "(1-5)(1-3)", "<ans>": ""}, None),
        ({"input": "a", "question": "(1-5)", "<ans>": {"b": ""}}, None),
        (
            {"o": {"<option_0>": "(1-5)", "<option_2>": "b"}, "question": "(1-5)", "<ans>": ""},
            ("<option_0>", "<option_2>"),
        ),
        ({"a": {"b": {"<option_0>": "c"}}, "<ans>": ""}, ("<option_0>",)),
        ({"a": {"<option_0>": "c"}, "b": {"<option_1>": "d"}, "<ans>": ""}, None),
        ({"a": {"<option_0>": "c", "d": "e"}, "<ans>": ""}, None),
        ({"input": "<option_0>", "<ans>": ""}, None),
    ],
)
def test_what_answers_may_be(document, allowed):
    assert tasks.find_constraints(document) == ({} if allowed is None else {(): allowed})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tasks.rate_text("a", answer="6"), "answer='6' is not one of 1, 2, 3, 4, 5"),
        (lambda: tasks.rate_text("a", lowest=5, highest=1), "lowest=5"),
        (lambda: tasks.choose_option("a", ["b"], "?"), "at least two"),
        (lambda: tasks.choose_option("a", ["b", "c"], "?", 2), "answer=2"),
        (lambda: tasks.fill_blanks("a<<mask_0>"), "has no blank"),
        (lambda: tasks.fill_blanks("<mask>", {"<mask_0>": "a"}), "the text has"),
        (lambda: tasks.extract_entities("a", []), "at least one"),
        (lambda: tasks.extract_entities("a", ["b"], {"c": ""}), "but kinds is"),
    ],
)
def test_bad_tasks(call, message):
    with pytest.raises(DataError, match=message):
        call()


RECORD = {
    "text": "a",
    "label": {"name": "b", "score": "3"},
    "choices": {"<option_0>": {"label": "c"}, "<option_1>": {"label": "d"}},
}


@pytest.mark.parametrize(
    ("shape", "document"),
    [
        ({"input": "$text", "<ans>": "$label.name"}, {"input": "a", "<ans>": "b"}),
        ({"x": "$label", "p": "constant"}, {"x": {"name": "b", "score": "3"}, "p": "constant"}),
        (
            {"options": {"*": "$choices.*.label"}},
            {"options": {"<option_0>": "c", "<option_1>": "d"}},
        ),
        ({"x.y": "$text", "x": {"z": "$$5"}}, {"x": {"y": "a", "z": "$5"}}),
        (
            {"*": {"is": {"*": "$*.*.label"}}},
            None,
        ),
        ({"all": {"*": "$label.*"}}, {"all": {"name": "b", "score": "3"}}),
    ],
)
def test_transforms(shape, document):
    transform = Transform(shape)
    if document is None:
        assert transform({"a": {"b": {"label": "c"}, "d": {"label": "e"}}}) == {
            "a": {"is": {"b": "c", "d": "e"}}
        }
    else:
        assert transform(RECORD) == document


def test_transforms_copy():
    made = Transform({"x": "$label"})(RECORD)
    made["x"]["name"] = "z"
    assert RECORD["label"]["name"] == "b"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("transform.py", "programs are not supported"),
        ({}, "must be a map"),
        ({"a": 3}, "allowed: a constant string"),
        ({"a": "$"}, "has an empty key"),
        ({"a": "$b..c"}, "has an empty key"),
        ({"a": "$b.*"}, "0 stars, but its source"),
        ({"*": "constant"}, "1 stars, but its source"),
    ],
)
def test_bad_transforms(shape, message):
    with pytest.raises(ConfigError, match=message):
        Transform(shape)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"a": "$absent"}, "which has no 'absent'"),
        ({"a": "$text.b"}, "text is 'a', which has no keys"),
        ({"a": "$label", "a.name": "c"}, "sets 'a.name'"),
        ({"a": "b", "a.c": "d"}, "sets 'a.c'"),
    ],
)
def test_records_that_do_not_fit(shape, message):
    with pytest.raises(DataError, match=message):
        Transform(shape)(RECORD)
