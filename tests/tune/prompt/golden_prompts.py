"""What the golden prompt cases are read with: their tokenizers and stand-in models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from bmforge.tokenizers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
CASES = json.loads((ROOT / "tests/golden/prompt_cases.json").read_text("utf-8"))
TEXTS = [case["text"] for case in CASES["parse"]]
SPIECE = ROOT.parent / "shared/data/vocab/t5/spiece.model"
_ROLES = {
    "bert": {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")},
    "gpt2": {f"{n}_token": "<|endoftext|>" for n in ("bos", "eos", "unk")} | {"pad_token": "<pad>"},
    "t5": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 100},
}
_TRAITS = {
    "bert": ("bidirectional", "masked tokens", ""),
    "gpt2": ("causal", "next token", ""),
    "t5": ("encoder-decoder", "spans", "<extra_id_{}>"),
}


def open_golden(name: str, folder: Path) -> Any:
    """Rebuild a tokenizer in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = {"bert": "Bert", "gpt2": "GPT2", "t5": "T5"}[name]
    config = {"tokenizer_class": f"{kind}Tokenizer", "do_lower_case": True, **_ROLES[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    recorded = CASES["tokenizers"][name]
    if name == "bert":
        (folder / "vocab.txt").write_text("\n".join(recorded["vocab"]) + "\n", "utf-8")
    elif name == "gpt2":
        (folder / "vocab.json").write_text(json.dumps(recorded["vocab"]), "utf-8")
        (folder / "merges.txt").write_text("\n".join(recorded["merges"]) + "\n", "utf-8")
    else:
        (folder / "spiece.model").write_bytes(SPIECE.read_bytes())
    return AutoTokenizer.from_pretrained(folder)


@cache
def stand_in(name: str, rows: int) -> Any:
    """Traits and a token table, which is all that a template asks of a model."""
    attention, objective, sentinel = _TRAITS[name]
    traits = SimpleNamespace(
        attention=attention, is_encoder_decoder=name == "t5", objective=objective,
        has_images=False, sentinel=sentinel, answer_sentinel=sentinel,
    )  # fmt: skip
    return SimpleNamespace(traits=traits, config=SimpleNamespace(), rows=rows)


def fresh_model(name: str, rows: int) -> Any:
    """A stand-in with a table of its own."""
    model = stand_in(name, rows)
    return SimpleNamespace(traits=model.traits, config=model.config, embed=nn.Embedding(rows, 4))
