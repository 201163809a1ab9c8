"""The tree of a model: what is folded, counted and marked, and the page's targets."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from torch import nn

from bmforge.cli import main
from bmforge.models import GPT2, GPT2Config
from bmforge.models.hub import find_preset
from bmforge.tune.delta import Lora
from bmforge.tune.delta.address import find_places
from bmforge.tune.delta.tree import draw_tree, fold_tree, short_count, walk_rows

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 12,
    "num_heads": 4,
    "max_seq_len": 32,
}


def gpt2(**fields: Any) -> GPT2:
    return GPT2.from_config(GPT2Config(**{**SIZES, **fields}), device="meta")


def shown(model: nn.Module, width: int = 160) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw_tree(fold_tree(model)))
    return console.export_text().splitlines()


def whole_t5() -> nn.Module:
    family, config = find_preset("t5-11b")
    return family.from_config(config, device="meta")


def test_equal_layers_are_one_row_and_all_is_counted() -> None:
    model = gpt2()
    rows = {row.name: row for _, row in walk_rows(fold_tree(model))}
    assert rows["model"].counts.total == sum(p.numel() for p in model.parameters())
    layers = rows["layers.0-11"]
    assert layers.targets == ("layers.*",)
    assert layers.counts.total == sum(p.numel() for p in model.layers.parameters())
    assert rows["q_proj, k_proj, v_proj, o_proj"].targets[1] == "layers.*.attn.k_proj"
    assert layers.counts.trained == layers.counts.total
    assert rows["lm_head"].tensors[0].is_again


def test_what_differs_is_apart_and_its_targets_find_it() -> None:
    """Every row's targets name just the modules that it stands for."""
    model = gpt2()
    delta = Lora(model, ["[r]layers\\.(3|4|10)\\.attn\\.q_proj"], rank=2)
    tree = fold_tree(model)
    rows = [row for _, row in walk_rows(tree) if row.targets]
    names = [row.name for row in rows if row.kind == "Block" or row.name.startswith("layers")]
    assert [n for n in names if n[0].isdigit()] == ["0-2", "3-4", "5-9", "10", "11"]
    found = [set(find_places(model, row.targets)) for row in rows]
    modules = {n for n, m in model.named_modules() if n and any(True for _ in m.parameters())}
    deltas = {f"{place}.default" for place in delta.places()}
    assert set().union(*found) == modules - deltas
    for number, one in enumerate(found):
        assert not any(one & other for other in found[number + 1 :])
    assert tree.counts.trained == tree.counts.delta == delta.count_parameters()


def test_whose_each_tensor_is() -> None:
    model = gpt2(num_layers=1)
    Lora(model, ["attn.q"], rank=2, modules_to_save=["norm"])
    whose = {t.whose for _, row in walk_rows(fold_tree(model)) for t in row.tensors}
    assert whose == {"delta", "trained", "frozen"}
    frozen = [row for _, row in walk_rows(fold_tree(model)) if row.name == "embed"]
    assert frozen[0].tensors[0].whose == "frozen"


def test_a_large_model_fits_one_screen() -> None:
    model = whole_t5()
    lines = shown(model)
    assert len(lines) <= 40
    assert "11.31B" in lines[0]
    assert any("layers.0-23" in line for line in lines)


def test_any_model_has_a_tree() -> None:
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3)
    with torch.device("meta"):
        model = transformers.BertModel(config)
    assert any("layer.0-2" in line for line in shown(model))
    empty = fold_tree(model, keep_empty=True)
    assert any(row.kind == "Dropout" for _, row in walk_rows(empty))
    assert not any(row.kind == "Dropout" for _, row in walk_rows(fold_tree(model)))
    assert fold_tree(nn.Identity()).counts.total == 0


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0"), (999, "999"), (1500, "1.50K"), (10**9, "1.00B"), (2 * 10**8, "200.0M")],
)
def test_short_counts(count: int, said: str) -> None:
    assert short_count(count) == said


def test_the_command_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2.from_config(GPT2Config(**{**SIZES, "num_layers": 2}))
    model.save_pretrained(tmp_path / "model")
    delta = Lora(model, rank=2)
    delta.save(tmp_path / "delta")
    given = ["tree", str(tmp_path / "model"), "--adapter", str(tmp_path / "delta")]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "layers.0-1" in said
    assert "delta0  LowRank" in said
    page = tmp_path / "page.html"
    assert main([*given, "--html", str(page)]) == 0
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?:", text)  # one file
    targets = [json.loads(html.unescape(t)) for t in re.findall(r'data-targets="([^"]*)"', text)]
    plain = GPT2.from_config(model.config.replace(changes=()), device="meta")
    assert find_places(plain, [t for row in targets for t in row])
    assert f"{delta.count_parameters():,} of them trained" in text
    assert main([*given, "--html", str(tmp_path / "page.txt")]) == 2
    assert main(["tree", "nothing"]) == 2
