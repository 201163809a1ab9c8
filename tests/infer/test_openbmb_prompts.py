"""Prompts for OpenBMB's models: formats and defaults of the original code."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import generate
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.infer.openbmb.texts import write_text
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.models.cpm2 import CPM2, CPM2Config
from bmforge.models.cpm_ant import CPMAnt
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.models.eva import EVA, EVAConfig
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.testing.golden import Golden
from bmforge.tokenizers import (
    CPM1Tokenizer,
    CPM2Tokenizer,
    CPMAntTokenizer,
    CPMBeeTokenizer,
    EVATokenizer,
)

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
ANT_HEAD = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>"]
CHARACTERS = "一二三四五六七八九十天地人你我他好不上下"
CPM2_HEAD = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂"]
# One character for every other id of the vectors' 61; 1 is what the vocabulary lacks.
LETTERS = [chr(0x4E00 + 7 * number) for number in range(53)]
# prompts, and what CPMAntBeamSearch of CPM-Live's branch cpm-ant wrote for them (max_length=9,
# `<unk>` is id 1), with the weights of golden/cpm_ant.npz changed as in `ant`
SEARCHED: dict[float, list[tuple[list[int], list[int]]]] = {
    1.0: [
        ([8, 1, 57, 42, 8, 60, 41, 41], [18, 25, 18, 18, 25, 4, 4, 4, 4, 18]),
        ([60, 35, 21, 42, 26, 23, 10], [15, 4, 4]),
        ([24, 10, 50], [37, 21, 21, 6, 52, 4, 25, 21, 6, 21]),
        ([51, 1, 8, 50, 24, 28], [18, 4, 4, 4, 4, 4, 18, 21, 21, 21]),
        ([40, 31, 46, 57, 50, 46, 38, 25], [18, 18, 18, 18, 18, 18, 18, 18, 18, 18]),
        ([28, 18, 45, 16, 47], [11, 21, 11, 15, 43, 15, 38, 18, 21, 15]),
        ([49, 1, 16, 15, 10, 38, 13, 49], [37, 11, 1, 21, 11, 11, 1, 15, 8, 8]),
        ([48, 51, 53, 57, 25], [18, 53, 22, 52, 4, 15, 4, 4, 4, 51]),
        ([59, 40, 15, 11, 27], [18, 28, 18, 4, 4, 4, 4, 25, 18, 21]),
        ([28, 1, 19, 41, 49, 8, 55, 47], [6, 4, 36, 18, 11, 1, 1, 1, 1, 1]),
        ([41, 1, 13], [21, 19, 6, 6, 6, 32, 4, 4, 4, 46]),
        ([51, 13, 42, 33], [2, 18, 46, 4, 6, 6, 6, 6, 22, 22]),
    ],
    1.5: [
        ([60, 35, 21, 42, 26, 23, 10], [15, 4]),
        ([24, 10, 50], [37, 21, 6, 11, 35, 15, 53, 14, 22, 43]),
        ([28, 1, 19, 41, 49, 8, 55, 47], [6, 4, 36, 18, 11, 1, 35, 21, 51, 15]),
        ([51, 13, 42, 33], [2, 18, 46, 4, 6, 13, 25, 21, 6, 6]),
    ],
}


@pytest.fixture(scope="module")
def ant(tmp_path_factory: pytest.TempPathFactory) -> CPMAnt:
    """The vectors' weights with louder layers, and ends and line breaks that are likely."""
    folder = tmp_path_factory.mktemp("ant")
    Golden(GOLDEN / "cpm_ant.npz", atol=1e-5).write(folder)
    model = CPMAnt.from_pretrained(folder)
    with torch.no_grad():
        model.embed.weight *= 8
        for layer in model.layers.values():
            layer.attn.o_proj.weight *= 16
            layer.mlp.down_proj.weight *= 16
        model.embed.weight[7] *= 3
        model.embed.weight[4] *= 2
    return model.eval()


@cache
def ant_tokenizer() -> CPMAntTokenizer:
    pytest.importorskip("rjieba", reason="needs the extra zh")
    return CPMAntTokenizer("\n".join([*ANT_HEAD, *LETTERS]).encode())


def as_text(ids: list[int]) -> str:
    """The text of ids, without what marks its ends; 1 is a character that no vocabulary has."""
    written = [*ANT_HEAD[:4], "\n", " ", *ANT_HEAD[6:], *LETTERS]
    return "".join("〇" if id == 1 else written[id] for id in ids if id not in (0, 6, 7))


@pytest.mark.parametrize("penalty", SEARCHED)
def test_ant_searches_as_the_original(ant: CPMAnt, penalty: float) -> None:
    """Ids and stops of the original's own search, which has three beams when nothing is said."""
    for prompt, written in SEARCHED[penalty]:
        text = as_text(prompt)
        found = write_text(
            ant, ant_tokenizer(), text, max_new_tokens=10, repetition_penalty=penalty
        )
        want = text.replace("〇", "") + as_text(written).replace("〇", "<unk>")
        assert found == want, (prompt, written)


def test_ant_draws_as_the_original(ant: CPMAnt) -> None:
    """From `<s>` and what can be spelled, no end and no line break first, at .9 among the .9."""
    prompt = [8, 1, 57, 42]
    counts = torch.zeros(61)
    written = [*ANT_HEAD[:4], "\n", " ", *ANT_HEAD[6:], *LETTERS]
    torch.manual_seed(3)
    for _ in range(150):
        text = write_text(ant, ant_tokenizer(), as_text(prompt), max_new_tokens=1, do_sample=True)
        counts[written.index(text[3:] or "<s>")] += 1
    with torch.no_grad():
        scores = ant(torch.tensor([[6, 8, 57, 42]])).logits[0, -1]
    scores[[4, 7]] = -torch.inf
    chances, order = (scores / 0.9).softmax(-1).sort(descending=True)
    kept = int((chances.cumsum(0) < 0.9).sum()) + 1
    want = torch.zeros(61).index_copy(0, order[:kept], chances[:kept] / chances[:kept].sum())
    assert counts[want == 0].sum() == 0
    assert 1 < kept < 59
    assert (counts / 150 - want).abs().max() < 0.15


def test_what_is_said_comes_before_the_defaults(ant: CPMAnt) -> None:
    text = as_text([8, 57, 42])
    ids = torch.tensor([[6, 8, 57, 42]])
    want = generate(ant, ids, max_new_tokens=6, eos_token_id=7)[0].tolist()
    assert want[4] not in (4, 7)  # which a text does not begin with
    greedy = write_text(ant, ant_tokenizer(), text, max_new_tokens=6, num_beams=1)
    assert greedy == as_text(want)
    with pytest.raises(ConfigError, match=r"top_p=0\.5 needs do_sample=True"):
        write_text(ant, ant_tokenizer(), text, top_p=0.5)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        write_text(ant, ant_tokenizer(), "")


def test_cpm1_draws(cpm1: Any) -> None:
    """At temperature 0.9, unless something else is said."""
    tokenizer, model = cpm1
    ids = torch.tensor([tokenizer.encode("天地")])
    usual = {"max_new_tokens": 12, "eos_token_id": tokenizer.eos_id}
    torch.manual_seed(1)
    drawn = generate(model, ids, do_sample=True, temperature=0.9, **usual)
    torch.manual_seed(1)
    assert write_text(model, tokenizer, "天地", max_new_tokens=12) == decode(tokenizer, drawn)
    for said in ({"do_sample": False}, {"num_beams": 2}):
        want = decode(tokenizer, generate(model, ids, **usual, **said))
        assert write_text(model, tokenizer, "天地", max_new_tokens=12, **said) == want


def decode(tokenizer: Any, rows: torch.Tensor) -> str:
    marks = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return tokenizer.decode([id for id in rows[0].tolist() if id not in marks])


@pytest.fixture(scope="module")
def cpm1() -> Any:
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    model = io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([*CHARACTERS] * 4), model_writer=model, model_type="char",
        vocab_size=40, hard_vocab_limit=False, user_defined_symbols=["<eod>", "▂", "▃"],
        control_symbols=["<sep>", "<pad>", "<mask>"], character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    tokenizer = CPM1Tokenizer(model.getvalue())
    config = CPM1Config(vocab_size=len(tokenizer), max_seq_len=32, init_std=0.4, **SMALL)
    return tokenizer, CPM1.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "model_class", "config_class"),
    [(EVATokenizer, EVA, EVAConfig), (CPM2Tokenizer, CPM2, CPM2Config)],
)
def test_encoder_decoders_read_their_form(kind: Any, model_class: Any, config_class: Any) -> None:
    """EVA `<sep>` and the blank of the answer behind the text, CPM-2 the blank of the rest."""
    pytest.importorskip("rjieba", reason="needs the extra zh")
    tokens = [*CPM2_HEAD, "▁", *CHARACTERS, "<s_0>", "<s_1>"]
    tokenizer = kind("\n".join(tokens).encode())
    first, second = tokens.index("<s_0>"), tokens.index("<s_1>")
    is_eva = kind is EVATokenizer
    start = {"decoder_start_token_id": first} if is_eva else {}
    config = config_class(
        vocab_size=len(tokens), intermediate_size=48, head_dim=8, init_std=0.5, eos_token_id=7,
        **start, **SMALL,
    )  # fmt: skip
    model = model_class.from_config(config, seed=6).eval()
    with torch.no_grad():
        model.lm_head.weight *= 4
    for prompt in ("你好", "天地人"):
        ids = [tokens.index(letter) for letter in prompt]
        source = [*ids, 4, first] if is_eva else [*ids, first]
        ends = (4,) if is_eva else (7, second)
        (out,) = generate(
            model, torch.tensor([source]), max_new_tokens=9, eos_token_id=ends
        ).tolist()
        marks = {first, second, 5, *((4,) if is_eva else (1, 7))}
        written = [id for id in out[1:] if id not in marks]
        assert len(written) > 3
        assert write_text(model, tokenizer, prompt, max_new_tokens=9) == tokenizer.decode(written)


def test_bee_fills_a_document() -> None:
    """That asks for the rest; marks in the prompt are characters."""
    head = [*ANT_HEAD, "<root>", "<ans>", "<option>"]
    tokenizer = CPMBeeTokenizer([*head, *"abcdefghijklmnopqrstuvwxyz<>"])
    config = CPMBeeConfig(
        vocab_size=len(tokenizer), intermediate_size=48, head_dim=8, num_buckets=16,
        num_relations=64, max_seq_len=64, **SMALL,
    )  # fmt: skip
    model = CPMBee.from_config(config).eval()
    with torch.no_grad():
        model.embed.weight *= 100
    document = {"input": "a<<mask_0> go", "prompt": "往后写约100字", "<ans>": ""}
    want = fill_documents(model, tokenizer, [document], max_new_tokens=7)[0]["<ans>"]
    found = write_text(model, tokenizer, "a<mask_0> go", max_new_tokens=7)
    assert found == want.replace("<<", "<")
    with pytest.raises(ConfigError, match="the prompt is empty"):
        write_text(model, tokenizer, " ")


def test_others_just_go_on() -> None:
    """Greedily, with the tokenizer's own end."""
    model = GPT2.from_config(GPT2Config(vocab_size=28, max_seq_len=32, init_std=0.4, **SMALL))

    class Letters:
        bos_id = pad_id = None
        eos_id = 27

        def encode(self, text: str) -> list[int]:
            return [ord(letter) - 97 for letter in text]

        encode_prompt = encode

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + id) for id in ids)

        decode_written = decode

    ids = torch.tensor([[0, 1, 2]])
    want = generate(model.eval(), ids, max_new_tokens=9, eos_token_id=27)
    assert write_text(model, Letters(), "abc", max_new_tokens=9) == decode(Letters(), want)
    with pytest.raises(ShapeError, match="ids from 0 to 200"):
        write_text(model, Letters(), "a" + chr(97 + 200))
