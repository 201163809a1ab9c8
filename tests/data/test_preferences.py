"""Forms of preference data, and the rows that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.data.sources.preferences import read_preferences
from bmforge.errors import DataError
from bmforge.recipes.inputs.preference_rows import (
    EncodedPair,
    MarkedAnswers,
    PreferencePairs,
    encode_preference,
)
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nhelp<|im_end|>\n' }}"
    "{%- endif %}{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m.tool_calls %}{{ m.tool_calls[0].function.name }}{%- endif %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
THINKING = CHATML.replace("assistant\n' }}{%- endif", "assistant\n<think>\n' }}{%- endif")
LETTERS = "abcdefghijklmnopqrstuvwxyzUA:, \n.<>/"
USER, OTHER = {"role": "user", "content": "hi"}, {"role": "user", "content": "bye"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def make_tokenizer(folder: Path, **config: Any) -> Any:
    """A tokenizer of letters, and of the word 'ab', with ChatML's marks."""
    marks = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: id for id, token in enumerate([*marks, *LETTERS, "ab"])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(marks)
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, **config}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tok") / "t", add_bos_token=True)


def read(folder: Path, *records: Any) -> Any:
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return read_preferences(file)


def encode(example: Any, tokenizer: Any, source: str = CHATML) -> EncodedPair:
    return encode_preference(example, ChatTemplate(source, tokenizer), tokenizer, ("id",))


def split(row: Any, tokenizer: Any) -> tuple[str, str]:
    """The texts of the tokens before the first label, and of the labelled tokens."""
    first = next(n for n, label in enumerate(row.labels) if label != -100)
    learned = [label for label in row.labels if label != -100]
    return tokenizer.decode(row.ids[:first]), tokenizer.decode(learned)


PAIR = {"prompt": [USER], "chosen": [says("yes")], "rejected": [says("no")]}
SAME_PAIR = [
    PAIR,
    {"chosen": [USER, says("yes")], "rejected": [USER, says("no")]},
    {"prompt": "hi", "chosen": [USER, says("yes")], "rejected": [USER, says("no")]},
    {"prompt": "hi", "chosen": [says("yes")], "rejected": [says("no")]},
    {"prompt": [USER], "chosen": "yes", "rejected": "no"},
    {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"},
    {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    {"messages": [USER], "chosen": says("yes"), "rejected": says("no")},
    {"prompt": [USER], "completions": ["fair", "yes", "no"], "scores": [3, 4.5, 1]},
    {"prompt": [USER], "completions": [[says("yes")], [says("no")]], "scores": [2, 1]},
]


@pytest.mark.parametrize("number", range(len(SAME_PAIR)))
def test_published_forms_give_one_pair(number: int, tmp_path: Path, tokenizer: Any) -> None:
    """The same conversation in every form has the same rows."""
    (example,) = read(tmp_path, SAME_PAIR[number])
    pair = encode(example, tokenizer)
    assert pair[:2] == encode(read(tmp_path, PAIR)[0], tokenizer)[:2]
    for row, text in zip(pair[:2], ("yes", "no"), strict=True):
        before, learned = split(row, tokenizer)
        assert before == (
            "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert learned == f"{text}<|im_end|>\n"


def test_margins(tmp_path: Path) -> None:
    """A margin, the difference of scores in both spellings, best minus worst, or none."""
    plain = {"prompt": "a", "chosen": "b", "rejected": "c"}
    records = [
        {**plain, "margin": 2},
        {**plain, "chosen_score": 5, "rejected_score": 1.5},
        {**plain, "score_chosen": 5, "score_rejected": 1.5},
        {"prompt": "a", "completions": ["b", "c"], "scores": [1, 4]},
        plain,
    ]
    assert [e.margin for e in read(tmp_path, *records)] == [2.0, 3.5, 3.5, 3.0, None]
    for margin in ("2", float("nan"), float("inf"), True):
        with pytest.raises(DataError, match="finite numbers"):
            read(tmp_path, {**plain, "margin": margin})


def test_marked_answers(tmp_path: Path) -> None:
    """TRL's label and LLaMA-Factory's kto_tag, texts and conversations."""
    examples = read(
        tmp_path,
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": [USER], "completion": [says("no")], "label": False},
        {"instruction": "hi", "output": "yes", "kto_tag": True},
        {"messages": [USER, says("no")], "label": False},
        {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
            "kto_tag": True,
        },
    )
    assert [(e.prompt, e.chosen, e.rejected) for e in examples] == [
        ("a", "b", None),
        ([USER], None, [says("no")]),
        ([USER], [says("yes")], None),
        ([USER], None, [says("no")]),
        ([USER], [says("yes")], None),
    ]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"prompt": "a"}, "not a preference record"),
        ({"prompt": "a", "chosen": "b", "rejected": [says("c")]}, "both"),
        ({"chosen": [says("a")], "rejected": [says("b")]}, "common messages"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label='good'"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1]}, "the same length"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1, float("nan")]}, "finite"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [2, 2.0]}, "no answer is preferred"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, "'system' has no effect"),
        ({"chosen": "a b", "rejected": "a c", "system": "d"}, "'system' has no effect"),
        ({"prompt": "a", "completion": "b", "label": True, "system": "d"}, "'system' has no"),
        ({"prompt": [USER], "chosen": [OTHER], "rejected": [OTHER]}, "assistant"),
        ({"prompt": "a", "label": True}, "completion"),
    ],
)
def test_other_forms_are_refused(record: Any, what: str, tmp_path: Path) -> None:
    """A record that is no preference is an error that names the file and the line."""
    with pytest.raises(DataError, match=what) as error:
        read(tmp_path, record)
    assert "line 1" in str(error.value)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.text("abc ,", max_size=6),
    chosen=st.text("abc ,", max_size=6),
    rejected=st.text("abc ,", max_size=6),
    has_bos=st.booleans(),
)
def test_plain_texts_have_one_begin_and_one_end(
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
    prompt: str,
    chosen: str,
    rejected: str,
    has_bos: bool,
) -> None:
    """Prompt ids are equal and those of generation; begin and end once; no character is lost."""
    if not has_bos:
        tokenizer = make_tokenizer(tmp_path_factory.mktemp("t") / "plain")
    (example,) = read(
        tmp_path_factory.mktemp("d"), {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    )
    pair = encode(example, tokenizer)
    want = tokenizer.encode_prompt(prompt)
    for row, answer in zip(pair[:2], (chosen, rejected), strict=True):
        assert row.ids[: len(want)] == want
        assert row.ids.count(tokenizer.bos_id) == has_bos
        assert row.ids.index(tokenizer.eos_id) == len(row.ids) - 1
        body = [id for id in row.ids if id not in (tokenizer.bos_id, tokenizer.eos_id)]
        assert tokenizer.decode(body) == prompt + answer
        scored = max(len(want), 1)
        assert row.labels == [-100] * scored + row.ids[scored:]


def test_an_end_in_the_text_is_not_doubled(tmp_path: Path, tokenizer: Any) -> None:
    """Texts that carry the begin and end tokens themselves get no second ones."""
    record = {"prompt": "<s>a", "chosen": "b</s>", "rejected": "c"}
    pair = encode(read(tmp_path, record)[0], tokenizer)
    assert pair.chosen is not None
    assert tokenizer.decode(pair.chosen.ids) == "<s>ab</s>"


@settings(max_examples=60, deadline=None)
@given(
    common=st.text("abc ", max_size=6),
    chosen=st.text("abc ", max_size=5),
    rejected=st.text("abc ", max_size=5),
)
def test_implicit_prompts(
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
    common: str,
    chosen: str,
    rejected: str,
) -> None:
    """Whole texts keep every character; the rows agree before the first label and differ there."""
    record = {"chosen": common + chosen, "rejected": common + rejected}
    (example,) = read(tmp_path_factory.mktemp("d"), record)
    rows = encode(example, tokenizer)[:2]
    for row, text in zip(rows, record.values(), strict=True):
        assert row.ids == [*tokenizer.encode_prompt(text), tokenizer.eos_id]
    starts = [
        next((n for n, label in enumerate(row.labels) if label != -100), len(row.ids))
        for row in rows
    ]
    if record["chosen"] != record["rejected"]:
        assert starts[0] == starts[1]
        assert rows[0].ids[: starts[0]] == rows[1].ids[: starts[0]]
        assert rows[0].ids[starts[0]] != rows[1].ids[starts[0]]


def test_implicit_conversations(tmp_path: Path, tokenizer: Any) -> None:
    """Several turns: the answers in which the conversations differ, or the last one."""
    talk = [USER, says("a"), OTHER]
    cases = [
        ([*talk, says("b")], [*talk, says("c")], ("b<|im_end|>\n", "c<|im_end|>\n")),
        ([*talk, says("b")], [*talk, says("b")], ("b<|im_end|>\n",) * 2),
        (
            [USER, says("b")],
            [USER, says("b"), OTHER, says("c")],
            ("b<|im_end|>\n", "b<|im_end|>\nc<|im_end|>\n"),
        ),
        (
            [USER, says("b"), OTHER, says("d")],
            [USER, says("a"), OTHER, says("d")],
            ("b<|im_end|>\nd<|im_end|>\n", "a<|im_end|>\nd<|im_end|>\n"),
        ),
    ]
    for chosen, rejected, want in cases:
        pair = encode(read(tmp_path, {"chosen": chosen, "rejected": rejected})[0], tokenizer)
        texts = [split(row, tokenizer) for row in pair[:2]]
        assert tuple(learned for _, learned in texts) == want
        assert texts[0][0] == texts[1][0]
        assert texts[0][0].count("help") == 1  # the template's system prompt, once


def test_tool_results_are_masked(tmp_path: Path, tokenizer: Any) -> None:
    """Calls and answers of the assistant are scored, results of tools are not."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    chosen = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        says("yes"),
    ]
    record = {"prompt": [USER], "chosen": chosen, "rejected": [says("no")], "tools": []}
    pair = encode(read(tmp_path, record)[0], tokenizer)
    assert pair.chosen is not None
    assert split(pair.chosen, tokenizer)[1] == "look<|im_end|>\nyes<|im_end|>\n"
    assert "found" in tokenizer.decode(pair.chosen.ids)


# The last answer has another end than earlier ones, as in OLMo 2's template.
END_OF_LAST = CHATML.replace(
    "'<|im_end|>' +", "('</s>' if loop.last and m.role == 'assistant' else '<|im_end|>') +"
)
READS_FIELD = CHATML.replace("{{ m['content']", "{{ m.thinking if m.tools }}{{ m['content']")


@pytest.mark.parametrize(
    ("source", "answer", "problem", "advice"),
    [
        (END_OF_LAST, [says("yes"), OTHER, says("no")], "changes message 2", "into 'prompt'"),
        (CHATML, [says("yes") | {"weight": 0}], "weight 0", "Remove the weight"),
        (CHATML, [says("yes") | {"thinking": "hm"}], "thoughts of message 2", "at the beginning"),
        (READS_FIELD, [says("yes") | {"reasoning": "hm"}], "thoughts of", "the field 'thinking'"),
    ],
)
def test_answers_that_a_template_changes(
    source: str, answer: Any, problem: str, advice: str, tmp_path: Path, tokenizer: Any
) -> None:
    """The error names file and line, what is wrong, and what helps."""
    examples = read(tmp_path, PAIR, PAIR | {"chosen": answer})
    encode(examples[0], tokenizer, source)
    with pytest.raises(DataError) as raised:
        encode(examples[1], tokenizer, source)
    said = str(raised.value)
    assert said.startswith(f"'{tmp_path / 'data.jsonl'}', line 2: ")
    assert problem in said
    assert advice in said


def test_answers_of_several_messages_are_one_row(tmp_path: Path, tokenizer: Any) -> None:
    """All assistant messages are answers; the user's message between them is not."""
    several = [says("yes"), OTHER, says("good")]
    (example,) = read(tmp_path, PAIR | {"chosen": several})
    pair = encode(example, tokenizer)
    rendered = ChatTemplate(CHATML, tokenizer).render([USER, *several])
    assert tokenizer.decode(pair.chosen.ids) == rendered
    assert split(pair.chosen, tokenizer)[1] == "yes<|im_end|>\ngood<|im_end|>\n"


def test_a_generation_prompt_that_opens_a_thought(tmp_path: Path, tokenizer: Any) -> None:
    """Nothing is cut off an answer that does not begin as the generation prompt ends."""
    pair = encode(read(tmp_path, PAIR)[0], tokenizer, THINKING)
    texts = [split(row, tokenizer) for row in pair[:2]]
    assert [learned for _, learned in texts] == ["yes<|im_end|>\n", "no<|im_end|>\n"]
    assert texts[0][0] == texts[1][0]


def test_unknown_fields_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A field that the template does not read is an error that names it, unless ignored."""
    (example,) = read(tmp_path, {**PAIR, "style": "x", "id": 3})
    with pytest.raises(DataError, match="style"):
        encode(example, tokenizer)


def test_fields_of_texts_are_refused_or_ignored(tmp_path: Path, tokenizer: Any) -> None:
    """No template reads them: a tool or a template variable would have no effect."""
    plain = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for fields in ({"tools": [{"name": "f"}]}, {"chat_template_kwargs": {"a": 1}}, {"style": "x"}):
        name = next(iter(fields))
        for record in ({**plain, **fields}, {"chosen": "a b", "rejected": "a c", **fields}):
            (example,) = read(tmp_path, record)
            template = ChatTemplate(CHATML, tokenizer)
            with pytest.raises(DataError, match=f"the fields {name}, .*--data.ignore {name}"):
                encode_preference(example, template, tokenizer)
            assert encode_preference(example, template, tokenizer, (name,)).chosen


def test_truncation_drops_and_counts(tmp_path: Path, tokenizer: Any) -> None:
    """A pair is left out if an answer vanishes, or both are equal after the cut."""
    records = [
        {"prompt": "aaaaaaaaaa", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "bbbbbbbbb", "rejected": "bbbbbbbbc"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "cccccccccc"},
    ]
    pairs = [encode(e, tokenizer) for e in read(tmp_path, *records)]
    source = PreferencePairs(pairs, 6)
    assert (len(source), source.dropped, source.width) == (1, 3, 6)
    batch = source.collate([source.make(0, ())])
    assert batch["input_ids"].shape == (2, 6)
    assert (batch["labels"] != -100).sum(1).tolist() == [2, 4]
    assert batch["attention_mask"].sum(1).tolist() == [4, 6]


def test_padding_equal_to_the_end_token(tmp_path: Path) -> None:
    """With pad = eos the end token is scored and inside the mask: both come from lengths."""
    tokenizer = make_tokenizer(tmp_path / "t", pad_token="</s>")
    assert tokenizer.pad_id == tokenizer.eos_id
    pairs = [
        encode(e, tokenizer)
        for e in read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "cc"})
    ]
    source = PreferencePairs(pairs, 64)
    batch = source.collate([source.make(0, ())])
    for row, length in enumerate((3, 4)):
        assert batch["labels"][row, length - 1] == tokenizer.eos_id
        assert batch["attention_mask"][row].sum() == length


def test_mismatched_answers(tmp_path: Path, tokenizer: Any) -> None:
    """KTO's second row has the prompt of the example and the answer to another prompt."""
    records = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "completion": "e", "label": False},
    ]
    source = MarkedAnswers([encode(e, tokenizer) for e in read(tmp_path, *records)], 64)
    assert len(source) == 3
    batch = source.collate([source.make(n, ()) for n in range(3)])
    texts = [tokenizer.decode([id for id in row.tolist() if id > 5]) for row in batch["input_ids"]]
    assert texts == ["ab", "ae", "ac", "ae", "de", "db"]
    assert batch["is_good"].tolist() == [1, 0, 0]
    with pytest.raises(DataError, match="the same prompt"):
        MarkedAnswers([encode(e, tokenizer) for e in read(tmp_path, records[0])], 64)
    with pytest.raises(DataError, match="kto"):
        PreferencePairs([encode(e, tokenizer) for e in read(tmp_path, records[1])], 64)
