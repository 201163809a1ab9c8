"""GLM-10B's tokenizers: text with blanks, and the inputs for filling them."""

from __future__ import annotations

import json

import pytest
import torch

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers import AutoTokenizer, GLMTokenizer


def test_english_text_is_gpt2s(english_folder):
    transformers = pytest.importorskip("transformers")
    peer = transformers.GPT2Tokenizer(
        vocab=json.loads((english_folder / "vocab.json").read_text("utf-8")),
        merges=[
            tuple(line.split())
            for line in (english_folder / "merges.txt").read_text("utf-8").splitlines()
            if not line.startswith("#version")
        ],
    )
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    for text in ("hello world", "  A model,\n\nsays: “héllo” 你好 ", ""):
        assert tokenizer.encode(text) == peer(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_blanks_eat_the_spaces_before_them(english_folder):
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    one = tokenizer.token_to_id
    expected = [*tokenizer.encode("hello"), one("[MASK]"), *tokenizer.encode(" world")]
    assert tokenizer.encode("hello [MASK] world") == expected
    assert tokenizer.encode("hello \n[gMASK]")[-1] == one("[gMASK]")
    assert tokenizer.encode("a [SEP]") == [*tokenizer.encode("a "), one("[SEP]")]
    assert tokenizer.decode(expected) == "hello [MASK]  world"
    assert tokenizer.special_ids["gmask"] == one("[gMASK]")
    assert tokenizer.vocab_size == tokenizer.token_to_id("[sMASK]") + 1


def test_chinese_text_with_blanks(chinese_folder):
    tokenizer = GLMTokenizer.from_pretrained(chinese_folder)
    text = "凯旋门位于[MASK]米兰市古城堡旁"
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.mask_id) == 1
    assert tokenizer.decode(ids) == text
    last = tokenizer.token_to_id("[gMASK]")
    assert tokenizer.vocab_size == last + 1
    assert tokenizer.decode([last]) == "[gMASK]"
    with pytest.raises(DataError, match=f"id={last + 1}"):
        tokenizer.decode([last + 1])
    with pytest.raises(DataError, match=f"id={tokenizer.mask_id + 2}"):
        tokenizer.decode([tokenizer.mask_id + 2])


def test_prepare_fills_up_and_cuts_the_beginning(english_folder):
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    start, end = tokenizer.special_ids["cls"], tokenizer.eos_id
    long, short = tokenizer.encode("hello world [MASK]"), tokenizer.encode("[MASK]")
    batch = tokenizer.prepare(["hello world [MASK]", "[MASK]"])
    gap = len(long) - len(short)
    assert batch["input_ids"].tolist() == [
        [start, *long, end],
        [start, *short, end, *[end] * gap],
    ]
    assert batch["attention_mask"].tolist() == [[1] * (len(long) + 2), [1] * 3 + [0] * gap]
    cut = tokenizer.prepare(["hello world [MASK]"], max_length=4)["input_ids"]
    assert cut.tolist() == [[start, *long[-2:], end]]
    for arguments in (([],), (["a"], 2)):
        with pytest.raises(ConfigError, match="needs at least one text"):
            tokenizer.prepare(*arguments)


def plain_inputs(tokenizer, batch, room, targets=None):
    """The original's rules, one position at a time."""
    out = {"input_ids": [], "position_ids": [], "mask": [], "labels": []}
    start, end = tokenizer.token_to_id("<|startofpiece|>"), tokenizer.token_to_id("<|endofpiece|>")
    answers = None
    if targets is not None:
        answers = [[*tokenizer.encode(target), end][:room] for target in targets]
        room = max(len(answer) for answer in answers)
    for row, (ids, real) in enumerate(
        zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    ):
        blank = min(at for at, id in enumerate(ids) if id in tokenizer.mask_ids)
        place = [*range(len(ids)), *[blank] * room]
        block = [0] * len(ids) + [number + 1 for number in range(room)]
        out["position_ids"].append([place, block])
        total = len(ids) + room
        mask = [[0] * total for _ in range(total)]
        for query in range(total):
            for key in range(total):
                if key < len(ids):
                    mask[query][key] = real[key]
                else:
                    mask[query][key] = int(len(ids) <= key <= query)
        out["mask"].append([mask])
        if answers is None:
            out["input_ids"].append([*ids, start])
        else:
            answer = answers[row]
            fill = [start, *answer] + [tokenizer.pad_id] * (room - len(answer))
            out["input_ids"].append([*ids, *fill[:room]])
            gap = room - len(answer)
            out["labels"].append([-100] * len(ids) + answer + [-100] * gap)
    return out


@pytest.mark.parametrize("targets", [None, ["hello world", "A"], ["", "says hello to the world"]])
@pytest.mark.parametrize("room", [1, 5, 40])
def test_inputs_for_generation(english_folder, targets, room):
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    batch = tokenizer.prepare(["A [sMASK] says [MASK].", "hello [gMASK]"])
    found = tokenizer.build_inputs_for_generation(batch, room, targets)
    expected = plain_inputs(tokenizer, batch, room, targets)
    mask = "generation_attention_mask" if targets is None else "attention_mask"
    names = {"input_ids", "position_ids", mask} | ({"labels"} if targets else set())
    assert set(found) == names
    assert found["input_ids"].tolist() == expected["input_ids"]
    assert found["position_ids"].tolist() == expected["position_ids"]
    assert found[mask].tolist() == expected["mask"]
    if targets:
        assert found["labels"].tolist() == expected["labels"]
    assert all(tensor.dtype == torch.int64 for tensor in found.values())


def test_inputs_by_hand(english_folder):
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    one = tokenizer.token_to_id
    batch = tokenizer.prepare(["[MASK]"])
    found = tokenizer.build_inputs_for_generation(batch, max_gen_length=2)
    ids = [one("[CLS]"), one("[MASK]"), one("<|endoftext|>"), one("<|startofpiece|>")]
    assert found["input_ids"].tolist() == [ids]
    assert found["position_ids"].tolist() == [[[0, 1, 2, 1, 1], [0, 0, 0, 1, 2]]]
    assert found["generation_attention_mask"][0, 0].tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_bad_requests_are_explained(english_folder):
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    with pytest.raises(DataError, match="character 7 of"):
        tokenizer.encode("[MASK] \ud800")
    with pytest.raises(ConfigError, match="input 1 has no blank"):
        tokenizer.build_inputs_for_generation(tokenizer.prepare(["[MASK]", "hello"]))
    batch = tokenizer.prepare(["[MASK]", "[gMASK]"])
    for targets in ("hello", ["hello"]):
        with pytest.raises(ConfigError, match="2 inputs"):
            tokenizer.build_inputs_for_generation(batch, targets=targets)


@pytest.mark.parametrize("kind", ["english_folder", "chinese_folder"])
def test_saving_and_opening_again(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is GLMTokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "hello 今天 [MASK] world [gMASK]"
    assert type(again) is GLMTokenizer
    assert again.encode(text) == tokenizer.encode(text)
    assert again.special_ids == tokenizer.special_ids
    assert again.vocab_size == tokenizer.vocab_size


def test_flags_of_newer_files_are_obeyed(english_folder, tmp_path):
    tokenizer = GLMTokenizer.from_pretrained(english_folder)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for entry in config["added_tokens_decoder"].values():
        entry["lstrip"] = False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    again = GLMTokenizer.from_pretrained(tmp_path)
    mask = tokenizer.mask_id
    assert again.encode("hello [MASK]") == [*tokenizer.encode("hello "), mask]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("added_tokens.json", None, "neither added_tokens.json"),
        ("added_tokens.json", '{"[MASK]": 300}', "are not defined"),
        ("vocab.json", None, "neither cog-pretrain.model"),
        ("merges.txt", "no merge here at all\n", "cannot read the vocabulary"),
        ("cog-pretrain.model", "text", "not a SentencePiece model"),
    ],
)
def test_bad_files_are_named(english_folder, tmp_path, name, content, match):
    for path in english_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=match):
        GLMTokenizer.from_pretrained(tmp_path)
