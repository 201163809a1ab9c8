"""Every command that writes a model keeps the base's tokenizer files and special-token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
import torch
import transformers
from chat_traits import TEMPLATES, write_bpe
from safetensors.torch import load_file
from small_runs import write_jsonl

from bmforge.cli import main
from bmforge.data import TokenStoreWriter
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_named import NAMED_TEMPLATES
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

TEMPLATE = TEMPLATES["thoughts of the last answer alone"]
# Templates besides the default one, which transformers 5 keeps in a folder.
NAMED = {"tool_use": TEMPLATES["plain ChatML"], "rag": TEMPLATES["no end mark"]}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
IDS = {"bos_token_id": 5, "eos_token_id": 2, "pad_token_id": 0}
# What transformers and others leave next to a tokenizer.json.
EXTRA = {"special_tokens_map.json": '{"bos_token": "<|endoftext|>"}', "added_tokens.json": "{}"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama `base` with all files of a published chat model, and data for each command."""
    root = tmp_path_factory.mktemp("files")
    base = write_bpe(root / "base", TEMPLATE)
    (base / "additional_chat_templates").mkdir()
    files = {f"additional_chat_templates/{name}.jinja": text for name, text in NAMED.items()}
    for name, text in {**EXTRA, **files}.items():
        (base / name).write_text(text)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=400, num_attention_heads=2, max_position_embeddings=256, **sizes, **IDS
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        **{**IDS, "eos_token_id": [2, 1]}, do_sample=True, top_p=0.8
    )
    model.save_pretrained(base)
    words = ["hi", "yes", "no", "abc"]
    turns = [{"role": "user", "content": "say it"}]
    answers = [[{"role": "assistant", "content": text}] for text in words]
    write_jsonl(root / "chats.jsonl", [{"messages": turns + answer} for answer in answers])
    pairs = [{"prompt": turns, "chosen": a, "rejected": answers[0]} for a in answers[1:]]
    write_jsonl(root / "pairs.jsonl", pairs)
    write_jsonl(root / "text.jsonl", [{"text": f"{word} 世界 " * 40} for word in words])
    return root


@pytest.fixture(scope="module")
def corpus(root: Path) -> Path:
    """Text that was prepared with the base's tokenizer."""
    text, out = str(root / "text.jsonl"), root / "corpus"
    assert main(["prepare", text, "--out", str(out), "--tokenizer", str(root / "base")]) == 0
    return out


def check_files(export: Path, base: Path) -> None:
    """Compare the files and ids of an export with those of its base model."""
    theirs, own = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (export, base))
    assert {**theirs.chat_template, "default": ""} == {**NAMED, "default": ""}
    for tools in (None, [TOOL]):
        texts = [t.apply_chat_template(CHAT, tools=tools, tokenize=False) for t in (theirs, own)]
        assert texts[0] == texts[1]
        template = ChatTemplate(find_template(export), AutoTokenizer.from_pretrained(export))
        assert template.render(CHAT, tools=tools) == texts[1]
    settings = (json.loads((f / "tokenizer_config.json").read_text()) for f in (base, export))
    assert next(settings) == next(settings)
    assert {name: (export / name).read_text() for name in EXTRA} == EXTRA
    generation = json.loads((export / "generation_config.json").read_text())
    assert generation == json.loads((base / "generation_config.json").read_text())
    if (export / "config.json").exists():  # an adapter has none
        config = json.loads((export / "config.json").read_text())
        assert {name: config[name] for name in IDS} == IDS


def train(task: str, root: Path, data: Path, run: Path, *more: str) -> Path:
    sizes = ("--seq-len", "64", "--batch-size", "2", "--micro-batch-size", "1", "--steps", "1")
    arguments = ["train", task, "--model", str(root / "base"), "--data", str(data), *sizes]
    assert main([*arguments, "--run-dir", str(run), *more]) == 0
    return run / "export"


def test_prepare_keeps_the_files_of_a_tokenizer(root: Path, corpus: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        stored = (corpus / "tokenizer" / name).read_bytes()
        assert stored == (root / "base" / name).read_bytes(), name


def prepare_with_other_special_tokens(root: Path, place: Path) -> Path:
    """Prepare text with the base's tokenizer.json and another eos and chat template, no pad."""
    own = place / "tokenizer"
    own.mkdir()
    (own / "tokenizer.json").write_bytes((root / "base" / "tokenizer.json").read_bytes())
    settings = json.loads((root / "base" / "tokenizer_config.json").read_bytes())
    settings |= {"eos_token": "<|endoftext|>", "pad_token": None}
    assert settings != json.loads((root / "base" / "tokenizer_config.json").read_bytes())
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    (own / "chat_template.jinja").write_text(TEMPLATES["plain ChatML"])
    arguments = ["--out", str(place / "corpus"), "--tokenizer", str(own)]
    assert main(["prepare", str(root / "text.jsonl"), *arguments]) == 0
    return place / "corpus"


@pytest.mark.parametrize("text", ["prepared", "with other special tokens", "bare tokens"])
def test_pretraining(root: Path, corpus: Path, tmp_path: Path, text: str) -> None:
    if text == "bare tokens":
        with TokenStoreWriter(tmp_path / "tokens", vocab_size=400) as writer:
            writer.add_item(list(range(10, 390)))
            writer.end_document()
        corpus = tmp_path / "tokens"
    elif text == "with other special tokens":
        corpus = prepare_with_other_special_tokens(root, tmp_path)
    check_files(train("pretrain", root, corpus, tmp_path / "run"), root / "base")


def test_the_tokenizer_of_a_model_brings_no_weights(root: Path, tmp_path: Path) -> None:
    """`data.tokenizer` may be the directory of a model; the export is the trained one."""
    with TokenStoreWriter(tmp_path / "tokens", vocab_size=400) as writer:
        writer.add_item(list(range(10, 390)))
        writer.end_document()
    base = root / "base"
    more = ("--data.tokenizer", str(base), "--lr", "0.1", "--train.schedule.kind", "constant")
    export = train("pretrain", root, tmp_path / "tokens", tmp_path / "run", *more)
    check_files(export, base)
    old, new = (load_file(folder / "model.safetensors") for folder in (base, export))
    assert old.keys() == new.keys()
    assert not any(torch.equal(old[name], new[name]) for name in old if "proj" in name)


@pytest.mark.parametrize(
    ("task", "data"), [("conversations", "chats"), ("preferences", "pairs"), ("reward", "pairs")]
)
def test_tasks_on_conversations(root: Path, tmp_path: Path, task: str, data: str) -> None:
    export = train(task, root, root / f"{data}.jsonl", tmp_path / "run")
    check_files(export, root / "base")


def test_another_template_replaces_that_for_tools(root: Path, tmp_path: Path) -> None:
    """transformers would otherwise render conversations with tools by the tokenizer's template."""
    chats = root / "chats.jsonl"
    export = train("conversations", root, chats, tmp_path / "run", "--template", "chatml")
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    assert set(theirs.chat_template) == {"default", "rag"}
    assert theirs.chat_template["default"] == NAMED_TEMPLATES["chatml"]


def test_an_adapter_and_its_merge(root: Path, tmp_path: Path) -> None:
    chats = root / "chats.jsonl"
    export = train("conversations", root, chats, tmp_path / "run", "--adapter", "lora")
    check_files(export, root / "base")
    assert main(["merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
    check_files(tmp_path / "merged", root / "base")


@pytest.mark.parametrize(
    "options", [("quantize", "--scheme", "int8"), ("convert",), ("convert", "--dtype", "bf16")]
)
def test_writers_of_directories(root: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    command, *more = options
    assert main([command, str(root / "base"), str(tmp_path / "out"), *more]) == 0
    check_files(tmp_path / "out", root / "base")


@pytest.mark.parametrize("steps", [{}, {"structure": 1, "weights": 1}])
def test_compression(root: Path, corpus: Path, tmp_path: Path, steps: dict[str, int]) -> None:
    """Structured pruning, then sparsity with int8, at once or with training."""
    recipe: dict[str, object] = {
        "structure": {"intermediate_size": 32},
        "prune": {"pattern": "2:4"},
        "quantize": {"scheme": "int8", **({"training": "fake"} if steps else {})},
    }
    if steps:
        data = {"paths": [str(corpus)], "seq_len": 32, "global_batch_size": 2}
        recipe |= {"task": "pretrain", "steps": steps, "run": {"data": data}}
    file, out = tmp_path / "recipe.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(recipe))
    assert main(["compress", str(root / "base"), "--recipe", str(file), "--out", str(out)]) == 0
    check_files(out, root / "base")
