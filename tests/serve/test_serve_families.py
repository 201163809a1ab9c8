"""Chats with every kind of family: what the server answers is what a conversation here answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch

from bmforge.infer import Engine, EngineConfig, GenerationConfig, generate
from bmforge.infer.chat import Conversation
from bmforge.infer.openbmb.chat import Chat, ChatConfig
from bmforge.models import EVA, Bert, BertConfig, EVAConfig
from bmforge.tokenizers import AutoTokenizer, EVATokenizer
from bmforge.tokenizers.chat_template import ChatTemplate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from small_runs import CHARACTERS, HEAD
from test_chat_after_tuning import TALKERS, build
from test_sft import CHATML, write_letters

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters with ChatML's marks and sentinels."""
    folder = write_letters(tmp_path_factory.mktemp("letters") / "t", chat_template=CHATML)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(["<extra_id_0>", "<extra_id_1>", "<s_0>", "<s_1>"])
    fast.save(str(folder / "tokenizer.json"))
    return folder


def ask(server: Any, said: list[Any], **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        found = client.chat.completions.create(
            model=server.serving.name, messages=said, temperature=0, **fields
        )
        return list(found) if fields.get("stream") else found


@pytest.mark.parametrize("name", TALKERS)
def test_a_chat(name: str, letters: Path, start: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(letters)
    model = build(name)
    options = GenerationConfig(max_new_tokens=12)
    want = Conversation(model, tokenizer, ChatTemplate(CHATML, tokenizer), options).reply("hi")
    with (
        Engine(model, tokenizer=tokenizer, config=EngineConfig(max_tokens=256)) as engine,
        start(other=engine, place=letters) as server,
    ):
        said: list[Any] = [{"role": "user", "content": "hi"}]
        (choice,) = ask(server, said, max_tokens=12).choices
        assert choice.message.content.strip() == want
        streamed = ask(server, said, max_tokens=12, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in streamed)
        assert text == choice.message.content


def test_eva_answers_in_its_own_form(start: Any) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    tokenizer = EVATokenizer(
        "\n".join([*HEAD, *CHARACTERS, "<s_0>", "<s_1>"]).encode(), Path("vocab.txt")
    )
    config = EVAConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        head_dim=8, decoder_start_token_id=tokenizer.sentinel_id(0), init_std=0.5,
    )  # fmt: skip
    model = EVA.from_config(config).eval()
    chat = Chat(model, tokenizer, ChatConfig(num_beams=1, no_repeat_ngram=0, max_new_tokens=9))
    source = chat._read(["你好"])
    with Engine(model, tokenizer=tokenizer) as engine, start(other=engine) as server:
        (choice,) = ask(server, [{"role": "user", "content": "你好"}], max_tokens=9).choices
        out = generate(
            model, torch.tensor([source]), max_new_tokens=9, eos_token_id=tokenizer.sep_id
        )[0, 1:].tolist()
        end = tokenizer.sep_id
        assert choice.message.content == tokenizer.decode_written(
            out[: out.index(end)] if end in out else out
        )
        with pytest.raises(openai.BadRequestError, match="EVA's dialogue format"):
            ask(server, [{"role": "system", "content": "好"}, {"role": "user", "content": "好"}])


def test_an_encoder_embeds_and_no_more(start: Any, tmp_path: Path) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "you"]
    (tmp_path / "vocab.txt").write_text("\n".join(names))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    config = BertConfig(
        vocab_size=7, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, head="none",
        max_seq_len=32,
    )  # fmt: skip
    Bert.from_config(config, seed=1).save_pretrained(tmp_path)
    with Engine(tmp_path) as engine, start(other=engine, name="bert") as server:
        assert server.serving.main.abilities == ("embeddings",)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            (found,) = client.embeddings.create(model="bert", input="hello you").data
            assert found.embedding == pytest.approx(engine.embed("hello you")[0].tolist(), abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="does not support chat"):
            ask(server, [{"role": "user", "content": "hello"}])
