"""Talking to EVA: what is read and written, against generate and transformers' ban on repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from bmforge.errors import ConfigError
from bmforge.infer import GenerationConfig, generate
from bmforge.infer.openbmb.chat import Chat, ChatConfig, _NoRepeatDecoder
from bmforge.infer.sampling import find_repeats
from bmforge.models.eva import EVA, EVAConfig
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.testing import assert_close
from bmforge.tokenizers import EVATokenizer

CHARACTERS = "一二三四五六七八九十天地人你我他好不上下"
HEAD = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂"]


@pytest.fixture(scope="module")
def tokenizer() -> EVATokenizer:
    pytest.importorskip("jieba", reason="needs the extra zh")
    return EVATokenizer(
        "\n".join([*HEAD, *CHARACTERS, "<s_0>", "<s_1>"]).encode(), Path("vocab.txt")
    )


@pytest.fixture(scope="module")
def model(tokenizer: EVATokenizer) -> EVA:
    config = EVAConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        head_dim=8, decoder_start_token_id=tokenizer.sentinel_id(0), init_std=0.5,
    )  # fmt: skip
    return EVA.from_config(config).eval()


def test_an_answer_is_what_generate_writes(model: EVA, tokenizer: EVATokenizer) -> None:
    """Of the history with an end behind every utterance and the blank for the answer."""
    config = ChatConfig(num_beams=2, no_repeat_ngram=0, max_new_tokens=9, window=40)
    chat = Chat(model, tokenizer, config)
    first, second = chat.reply("你好"), chat.reply("天上人")
    assert chat.history == ["你好", first, "天上人", second]
    sep, blank = tokenizer.sep_id, tokenizer.sentinel_id(0)
    encode = tokenizer.encode
    for said, answer in ((["你好"], first), (["你好", first, "天上人"], second)):
        ids = [*(id for text in said for id in (*encode(text), sep)), blank]
        out = generate(
            model, torch.tensor([ids]), num_beams=2, length_penalty=1.8, repetition_penalty=1.2,
            max_new_tokens=9, min_new_tokens=2, eos_token_id=sep,
        )[0, 1:].tolist()  # fmt: skip
        assert answer == tokenizer.decode(out[: out.index(sep)] if sep in out else out)
    chat.clear()
    assert chat.reply("你好") == first


def test_drawing_follows_its_seed_and_repeats_nothing(
    model: EVA, tokenizer: EVATokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the original's defaults no three tokens come twice in an answer."""
    answers: list[list[int]] = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: answers.append(list(ids)) or "好")
    for seed in (3, 3, 4):
        Chat(model, tokenizer, ChatConfig(seed=seed, max_new_tokens=60, min_new_tokens=40)).reply(
            "一"
        )
    assert answers[0] == answers[1] != answers[2]
    for ids in answers:
        stretches = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
        assert len(stretches) > 20
        assert len(set(stretches)) == len(stretches)


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_repeats_against_transformers(ngram: int) -> None:
    """The tokens banned are those that its processor bans, in every row of a few draws."""
    processor = transformers.NoRepeatNGramLogitsProcessor(ngram)
    rows = torch.randint(4, (20, 12), generator=torch.Generator().manual_seed(ngram))
    banned = processor(rows, torch.zeros(20, 4)).isinf()
    for row, want in zip(rows.tolist(), banned, strict=True):
        assert set(find_repeats(row, ngram)) == set(want.nonzero()[:, 0].tolist())


def test_bad_input(model: EVA, tokenizer: EVATokenizer) -> None:
    gpt2 = GPT2.from_config(
        GPT2Config(vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, max_seq_len=16)
    )
    with pytest.raises(ConfigError, match="a GPT2 with a EVATokenizer does not support this chat"):
        Chat(gpt2, tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="message is empty"):
        Chat(model, tokenizer).reply("  ")
    with pytest.raises(ConfigError, match="window=2"):
        ChatConfig(window=2)
    with pytest.raises(ConfigError, match="top_p=0"):
        Chat(model, tokenizer, ChatConfig(top_p=0.0))


def test_what_may_not_come_again_in_a_pipeline(model: EVA) -> None:
    """A decoder that reads all anew at every step sees the same tokens and bans the same."""
    options = GenerationConfig(max_new_tokens=9)
    source, decoders = torch.tensor([[5, 6, 7], [8, 9, 5]]), []
    for whole in (False, True):
        decoder = _NoRepeatDecoder(model, source, options, 2)
        decoder._is_pipelined = whole
        decoders.append(decoder)
    rows = torch.tensor([1, 1])
    with torch.no_grad():
        for tokens in ([3, 3], [9, 4], [11, 9], [9, 11], [9, 9]):
            scores = [decoder.run(torch.tensor(tokens)[:, None]) for decoder in decoders]
            assert_close(scores[1], scores[0])
            for decoder in decoders:
                decoder.reorder(rows)
    assert scores[0].isinf().any()
