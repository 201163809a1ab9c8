"""ModelCenter's example programs run as they are written, and begin with transformers' losses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model_center_examples as programs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from test_model_center_dataset import BOOLQ, write

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center import model as old
from bmforge.compat.model_center.dataset import (
    cpm1dataset,
    cpm2dataset,
    gpt2dataset,
    llamadataset,
    t5dataset,
)
from bmforge.data import TokenStoreWriter
from bmforge.parallel import shutdown_distributed

ARGS = {"lr": 3e-3, "epochs": 6, "max_decoder_length": 5, "max_length": 24}
BLANK = 94
SIZES = {"vocab_size": 99, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 64}


class Words:
    """A tokenizer of letters with few ids; 1 ends a text where that is asked for."""

    pad_token_id, eos_token_id = 0, 1

    def __init__(self, starts: bool = False, ends: bool = False) -> None:
        self.starts, self.ends = starts, ends

    def encode(self, text: str) -> list[int]:
        for number in (0, 1):
            text = text.replace(f"<extra_id_{number}>", chr(number))
        ids = [BLANK + ord(c) if ord(c) < 2 else 3 + ord(c) % 90 for c in text]
        return [2] * self.starts + ids + [1] * self.ends

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def convert_tokens_to_ids(self, token: str) -> int:
        return BLANK + int(token[10])

    def get_sentinel_id(self, number: int) -> int:
        return BLANK + number

    def __call__(self, text: str, max_length: int, **_: Any) -> dict[str, Any]:
        ids = self.encode(text)[:max_length]
        rest = max_length - len(ids)
        return {"input_ids": ids + [0] * rest, "attention_mask": [1] * len(ids) + [0] * rest}


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    """Every program runs as one process, and leaves nothing behind."""
    bmt.init_distributed(seed=0)
    yield
    shutdown_distributed()


def save(folder: Path, kind: str, config: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(hf, kind)(config).eval()
    model.save_pretrained(folder)
    return model


def boolq(folder: Path, kind: Any, tokenizer: Words) -> tuple[dict[str, Any], torch.Tensor]:
    for name in ("train", "val"):
        write(folder, "BoolQ", f"{name}.jsonl", *BOOLQ)
    sets = {s: kind(str(folder), s, 0, 1, tokenizer, 24) for s in ("train", "dev")}
    return sets, torch.LongTensor(kind.get_verbalizer(tokenizer))


def stack(dataset: Any) -> dict[str, torch.Tensor]:
    rows = [dataset[n] for n in range(len(dataset))]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_llama(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    config = hf.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, **sizes)
    theirs = save(tmp_path / "model", "LlamaForCausalLM", config)
    sets, words = boolq(tmp_path, llamadataset.DATASET["BoolQ"], Words(starts=True))
    data = stack(sets["train"])
    mask = (torch.arange(24)[None] < data["input_length"][:, None]).long()
    with torch.no_grad():
        logits = theirs(data["input_ids"], attention_mask=mask).logits[..., words]
    wanted = F.cross_entropy(logits[torch.where(data["index"] == 1)], data["labels"]).item()
    model = old.Llama.from_pretrained(tmp_path / "model")
    losses, found, labels = programs.finetune_llama(model, sets, words, ARGS)
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert found == labels == [1, 0]


def test_gpt2(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(vocab_size=99, **sizes, **off)
    theirs = save(tmp_path / "model", "GPT2LMHeadModel", config)
    kind = gpt2dataset.DATASET["BoolQ"]
    sets, _ = boolq(tmp_path, kind, Words())
    words = torch.tensor([7, 8])  # of letters, both answers begin with a blank
    data = stack(sets["train"])
    mask = (torch.arange(24)[None] < data["input_length"][:, None]).long()
    with torch.no_grad():
        logits = theirs(data["input_ids"], attention_mask=mask).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())
    asked = logits[..., words][torch.where(data["index"] == 1)]
    wanted = (wanted + F.cross_entropy(asked, data["labels"])).item()
    model = old.GPT2.from_pretrained(tmp_path / "model")
    losses = programs.finetune_gpt2(model, sets, words, ARGS)
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0]


def test_gptj(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    theirs = save(
        tmp_path / "model", "GPTJForCausalLM", hf.GPTJConfig(vocab_size=99, **sizes, **off)
    )
    sets, _ = boolq(tmp_path, gpt2dataset.DATASET["BoolQ"], Words())
    words = torch.tensor([7, 8])
    data = stack(sets["train"])
    mask = (torch.arange(24)[None] < data["input_length"][:, None]).long()
    with torch.no_grad():
        logits = theirs(data["input_ids"], attention_mask=mask).logits[..., words]
    wanted = F.cross_entropy(logits[torch.where(data["index"] == 1)], data["labels"]).item()
    model = old.GPTj.from_pretrained(tmp_path / "model")
    losses, found, labels = programs.finetune_gptj(model, sets, words, ARGS)
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert found == labels == [1, 0]


# The three generations of checkpoints that the originals name, as their published configs say it.
GENERATIONS = {
    "T5": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "T5 v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "MT5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_t5_on_superglue(generation: str, tmp_path: Path) -> None:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    kind = generation.partition(" ")[0]
    config = getattr(hf, f"{kind}Config")(
        vocab_size=99, **shape, dropout_rate=0.0, **GENERATIONS[generation]
    )
    theirs = save(tmp_path / "model", f"{kind}ForConditionalGeneration", config)
    for name in ("train", "val"):
        write(tmp_path, "BoolQ", f"{name}.jsonl", *BOOLQ)
    task = t5dataset.DATASET["BoolQ"]
    sets = {s: task(str(tmp_path), s, 0, 1, Words(), 24, 4) for s in ("train", "dev")}
    words = torch.LongTensor(task.get_verbalizer(Words()))
    data = stack(sets["train"])
    with torch.no_grad():
        logits = theirs(
            data["enc_input"],
            attention_mask=(torch.arange(24)[None] < data["enc_length"][:, None]).long(),
            decoder_input_ids=data["dec_input"],
        ).logits[..., words]
    wanted = F.cross_entropy(logits[torch.where(data["index"] == 1)], data["targets"]).item()
    model = old.T5.from_pretrained(tmp_path / "model")
    losses, found, labels = programs.finetune_t5(model, sets, words, {**ARGS, "epochs": 12})
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert found == labels == [1, 0]


def test_t5_on_squad(tmp_path: Path) -> None:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=99, **shape, dropout_rate=0.0)
    theirs = save(tmp_path / "model", "T5ForConditionalGeneration", config)
    answers = [{"text": "Rome", "answer_start": 0}]
    asked = {"question": " where", "id": "1", "answers": answers}
    text = json.dumps({"data": [{"paragraphs": [{"context": "It", "qas": [asked]}]}]})
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(text)
    tokenizer, kind = Words(ends=True), t5dataset.DATASET["SQuAD"]
    sets = {s: kind(str(tmp_path), s, tokenizer, 60, 12) for s in ("train", "dev")}
    data = stack(sets["train"])
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    with torch.no_grad():
        logits = theirs(**{name: data[name] for name in names}).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), data["targets"].flatten()).item()
    model = old.T5.from_pretrained(tmp_path / "model")
    losses, written = programs.finetune_t5_squad(model, tokenizer, sets, ARGS)
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0]
    assert len(written) == 1


def lcqmc(folder: Path, kind: Any, *widths: int) -> tuple[Any, torch.Tensor]:
    (folder / "LCQMC").mkdir()
    table = "text_a\ttext_b\tlabel\n喜欢\t爱\t1\n来\t去\t0\n"
    (folder / "LCQMC" / "train.tsv").write_text(table, encoding="utf-8")
    found = kind(str(folder), "train", 0, 1, Words(), *widths)
    return found, torch.LongTensor(kind.get_verbalizer(Words()))


def test_cpm1(tmp_path: Path) -> None:
    """Its own decoder, on tasks and on a corpus."""
    model = old.CPM1(old.CPM1Config(**SIZES, num_layers=2))
    bmt.init_parameters(model)
    data, words = lcqmc(tmp_path, cpm1dataset.DATASET["LCQMC"], 24)
    losses = programs.finetune_cpm1(model, data, words, ARGS)
    assert losses[-1] < losses[0] / 2
    random.seed(0)
    corpus = [np.arange(10, 20, dtype=np.int32), np.arange(30, 38, dtype=np.int32)]
    losses = programs.pretrain_cpm1(model, corpus, ARGS)
    assert losses[-1] < losses[0]


def test_cpm2(tmp_path: Path) -> None:
    model = old.CPM2(old.CPM2Config(**SIZES, num_encoder_layers=2, num_decoder_layers=2))
    data, words = lcqmc(tmp_path, cpm2dataset.DATASET["LCQMC"], 24, 4)
    # Its weights are drawn small, so nothing is known in the beginning.
    losses = programs.finetune_cpm2(model, data, words, {**ARGS, "epochs": 20, "lr": 1e-2})
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0] / 2


def test_cpm2_pretraining(tmp_path: Path) -> None:
    """A corpus on disk, in a given order; pairs that are too long are left out."""
    sources = [[5, 26240, 7], [9, 26241, 11, 12], [13] * 7, [6, 26240]]
    targets = [[1, 26240, 8, 9], [1, 26241, 10], [1, 2], [1, 26240, 4, 5, 6, 7]]
    for name, rows in (("context", sources), ("target", targets)):
        with TokenStoreWriter(tmp_path / f"document_{name}", vocab_size=26430) as writer:
            for row in rows:
                writer.add_item(row)
                writer.end_document()
    sizes = {**SIZES, "vocab_size": 26240, "dim_model": 8}
    model = old.CPM2(old.CPM2Config(**sizes, num_encoder_layers=1, num_decoder_layers=1))
    bmt.init_parameters(model)
    # The same rows by hand: blanks among the last ids, the third pair out, the fourth with it.
    enc = torch.tensor([[9, 26051, 11, 12, 0, 0], [5, 26050, 7, 0, 0, 0]])
    dec = torch.tensor([[1, 26051, 10, 0], [1, 26050, 8, 9]])
    out = torch.tensor([[26051, 10, -100, -100], [26050, 8, 9, -100]])
    with torch.no_grad():
        logits = model(enc, torch.tensor([4, 3]), dec, torch.tensor([3, 4]))
    wanted = F.cross_entropy(logits.flatten(0, 1), out.flatten()).item()
    args = {"max_encoder_length": 6, "max_decoder_length": 4, "batch_size": 2, "lr": 1e-2}
    order = np.array([1, 2, 0] * 12 + [3])
    args |= {"save": str(tmp_path), "save_name": "cpm2"}
    losses = programs.pretrain_cpm2(model, tmp_path, order, args)
    assert len(losses) == 12
    assert losses[0] == pytest.approx(wanted, rel=1e-6)
    assert losses[-1] < losses[0] - 1
    again = old.CPM2(old.CPM2Config(**sizes, num_encoder_layers=1, num_decoder_layers=1))
    bmt.load(again, tmp_path / "cpm2.pt")
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
