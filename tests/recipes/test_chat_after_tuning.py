"""Chat with tuned models: prompts equal those of training, and answers end at a stop token."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from small_runs import bee_tokenizer
from test_sft import CHATML, sft_config, write_letters
from test_train_all_families import write_glm

from bmforge.cli import main
from bmforge.errors import ConfigError
from bmforge.infer import GenerationConfig, generate
from bmforge.infer.chat import Conversation
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.models.hub import FAMILIES
from bmforge.recipes.sft import train_sft
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.tokenizers.sentinels import fill_prompt

SIZES: dict[str, Any] = {
    "vocab_size": 43,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "max_seq_len": 256,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rotary_dim": 8,
    "plain_dim": 8,
    "rope_dim": 8,
    "value_dim": 8,
    "num_relations": 64,
    "intermediate_size": 128,
    "num_experts": 8,
    "num_dense": 0,
    "experts_per_token": 2,
    "expert_size": 16,
    "num_buckets": 8,
    "init_std": 0.5,
}
TALKERS = [
    name
    for name, family in FAMILIES.items()
    if family.family_traits.objective in ("next token", "spans", "hidden tokens")
]


def build(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    fields = {f.name for f in dataclasses.fields(family.config_class) if f.init}
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if key in fields}
    torch.manual_seed(3)
    return family.from_config(family.config_class(**sizes)).eval()


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_letters(tmp_path_factory.mktemp("letters") / "t", chat_template=CHATML)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(["<extra_id_0>", "<extra_id_1>", "<s_0>", "<s_1>"])
    fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", TALKERS)
def test_an_answer_is_what_is_written_after_the_template(name: str, letters: Path) -> None:
    """transformers writes what was said; an answer ends where the template's mark begins."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(letters)
    tokenizer = AutoTokenizer.from_pretrained(letters)
    model = build(name)
    options = GenerationConfig(max_new_tokens=12)
    chat = Conversation(
        model, tokenizer, ChatTemplate(CHATML, tokenizer), options, system="be kind"
    )
    unwritten = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    said = [{"role": "system", "content": "be kind"}]
    for text in ("hi", "bye"):
        said.append({"role": "user", "content": text})
        written = theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        answer = chat.reply(text)
        if model.traits.attention == "encoder-decoder":
            ids = fill_prompt(written, "", tokenizer, 500, model.traits.sentinel)
            end, skipped = tokenizer.token_to_id(model.traits.sentinel.format(1)), 1
        else:
            ids = theirs(written, add_special_tokens=False)["input_ids"]
            if model.traits.objective == "hidden tokens":
                ids = [tokenizer.bos_id, *ids]
            end, skipped = tokenizer.token_to_id("<|im_end|>"), len(ids)
        out = generate(model, torch.tensor([ids]), max_new_tokens=12, eos_token_id=())
        new = out[0, skipped:].tolist()
        marks = [end, tokenizer.eos_id, *([tokenizer.pad_id] if skipped == 1 else [])]
        if skipped == 1 and new[0] == tokenizer.token_to_id(model.traits.sentinel.format(0)):
            new = new[1:]
        stop = next((place for place, id in enumerate(new) if id in marks), len(new))
        assert answer == tokenizer.decode([id for id in new[:stop] if id not in unwritten]).strip()
        said.append({"role": "assistant", "content": answer})
        if "<" in answer:  # what an answer says is text here, and a special token in transformers
            break
    assert chat.history == said[1:]


def test_old_turns_make_room(letters: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A question goes with its answer; the last one is answered as long as anything fits."""
    tokenizer = AutoTokenizer.from_pretrained(letters)
    model = build("GPT2", max_seq_len=80)
    options = GenerationConfig(max_new_tokens=30, eos_token_id=())
    chat = Conversation(model, tokenizer, None, options, system="s")
    fresh = Conversation(model, tokenizer, None, options, system="s")
    chat.history = [{"role": r, "content": "a" * 20} for r in ("user", "assistant")]
    assert chat.reply("hi") == fresh.reply("hi")
    assert "the oldest 2 of 3 messages are left out" in caplog.text
    assert len(chat.history) == 4
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "a" * 36}]
    written = len(tokenizer.encode(fresh.template.render(said, True)))
    assert 80 - 30 < written < 80
    fresh.clear()
    assert len(tokenizer.encode(fresh.reply("a" * 36))) <= 80 - written
    with pytest.raises(ConfigError, match="together may have at most 80"):
        chat.reply("a" * 60)
    with pytest.raises(ConfigError, match="the message is empty"):
        chat.reply(" ")
    with pytest.raises(ConfigError, match="cannot be used with a chat template"):
        Conversation(build("GPT2", head="none"), tokenizer)


def test_glm_fills_a_blank(tmp_path: Path) -> None:
    """[CLS], the text, the blank, the end and the start of what fills it, as its tokenizer does."""
    (tmp_path / "glm").mkdir()
    write_glm(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "glm")
    marks = {name: tokenizer.role_id(name) for name in ("sop", "mask")}
    model = build(
        "GLM", vocab_size=len(tokenizer), sop_token_id=marks["sop"], mask_token_id=marks["mask"]
    )
    chat = Conversation(model, tokenizer, None, GenerationConfig(max_new_tokens=6))
    written = chat.template.render([{"role": "user", "content": "the list"}], True)
    inputs = tokenizer.build_inputs_for_generation(tokenizer.prepare([written + "[MASK]"]), 6)
    out = generate(
        model, inputs["input_ids"], torch.ones_like(inputs["input_ids"]), max_new_tokens=6,
        eos_token_id=(tokenizer.role_id("eop"), tokenizer.eos_id),
    )[0, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
    ends = (tokenizer.role_id("eop"), tokenizer.eos_id)
    stop = next((place for place, id in enumerate(out) if id in ends), len(out))
    mark = chat.template.end_mark().strip()
    written_ids = [id for id in out[:stop] if id not in marks.values()]
    assert chat.reply("the list") == tokenizer.decode(written_ids).partition(mark)[0].strip()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that says what it is told, trained without a template of the tokenizer's."""
    root = tmp_path_factory.mktemp("trained")
    config = sft_config(root, write_letters(root / "letters"), 80)
    train_sft(config)
    return config.run_dir / "export"


def test_what_was_learned_is_answered(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the command line, by the template that training exported."""
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n/clear\nwell\n/exit\nno\n"))
    assert main(["chat", str(trained), "--top-p", "0.01"]) == 0
    assert capsys.readouterr().out == "yes\nwell\n"
    assert main(["generate", str(trained), "--prompt", "bye", "--chat"]) == 0
    assert capsys.readouterr().out == "bye\n"
    assert main(["chat", str(trained), "--window", "20"]) == 2
    assert "only EVA supports window" in capsys.readouterr().err


def test_a_bee_answers_in_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bee_tokenizer()
    model = build("CPMBee", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4}
    documents = [{"input": "first", "<ans>": ""}]
    first = fill_documents(model, tokenizer, documents, **options)[0]["<ans>"]
    documents = [{"input": f"first\n{first}\nthen", "<ans>": ""}]
    second = fill_documents(model, tokenizer, documents, **options)[0]["<ans>"]
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nthen\n"))
    assert main(["chat", str(tmp_path), "--num-beams", "2", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert main(["chat", str(tmp_path), "--system", "be kind"]) == 2
    assert "is not supported by the dialogue format of a CPMBee" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["GPT2", "T5"])
def test_ids_without_a_token_spell_nothing(name: str, letters: Path) -> None:
    """Published models have more rows than their tokenizers have tokens."""
    tokenizer = AutoTokenizer.from_pretrained(letters)
    model = build(name, vocab_size=300, tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight[: len(tokenizer)].data)
    chat = Conversation(model, tokenizer, None, GenerationConfig(max_new_tokens=6))
    assert chat.reply("hi") == ""
