"""Finding, replacing and freezing modules by name."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bmforge.errors import ConfigError
from bmforge.surgery import (
    find_modules,
    find_parameters,
    find_repeated_blocks,
    freeze_,
    match_glob,
    replace_module_,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("name", "glob", "fits"),
    [
        ("layers.0", "layers.*", True),
        ("layers.0.attn", "layers.*", False),
        ("layers.0.attn", "layers.**", True),
        ("layers.0.attn.bias", "**.bias", True),
        ("bias", "**.bias", False),
        ("layersX0", "layers.0", False),
        ("a.b+c", "a.b+c", True),
        ("q_proj", "*_proj", True),
        ("a.q_proj", "*_proj", False),
    ],
)
def test_globs(name: str, glob: str, fits: bool) -> None:
    assert match_glob(name, glob) == fits


def matches_by_parts(name: list[str], glob: list[str]) -> bool:
    """A second, plain matcher for globs whose stars are whole parts."""
    if not glob:
        return not name
    if glob[0] == "**":
        return any(matches_by_parts(name[i:], glob[1:]) for i in range(1, len(name) + 1))
    return bool(name) and glob[0] in ("*", name[0]) and matches_by_parts(name[1:], glob[1:])


@given(
    st.lists(st.sampled_from(["a", "bb", "0"]), min_size=1, max_size=5),
    st.lists(st.sampled_from(["a", "bb", "0", "*", "**"]), min_size=1, max_size=4),
)
def test_globs_against_a_plain_matcher(name: list[str], glob: list[str]) -> None:
    assert match_glob(".".join(name), ".".join(glob)) == matches_by_parts(name, glob)


def test_find() -> None:
    model = Model()
    assert list(find_modules(model, globs=["layers.*"])) == ["layers.0", "layers.1", "layers.2"]
    # In the tree's order, each once, however the globs overlap.
    both = find_modules(model, globs=["layers.1.*", "layers.*.attn"])
    assert list(both) == ["layers.0.attn", "layers.1.attn", "layers.1.mlp", "layers.2.attn"]
    assert len(find_modules(model, kind=nn.Linear)) == 10
    assert len(find_modules(model, globs=["**.mlp.**"], kind=nn.Linear)) == 6
    assert find_parameters(model, ["embed.*"])["embed.weight"] is model.embed.weight
    with pytest.raises(ConfigError, match=re.escape("glob 'layers.*.atn' matches nothing.")):
        find_modules(model, globs=["layers.*.atn"])
    with pytest.raises(ConfigError, match=r"Did you mean 'embed\.weight'"):
        find_parameters(model, ["embd.weight"])


def test_replace() -> None:
    model, new = Model(), nn.Identity()
    old = model.layers[1].mlp[0]
    assert replace_module_(model, "layers.1.mlp.0", new) is old
    assert model.layers[1].mlp[0] is new
    replace_module_(model, "head", new)
    assert model.head is new


def test_freeze() -> None:
    model = freeze_(Model(), ["embed.*", "**.bias"])
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"embed.weight"} | {
        n for n, _ in model.named_parameters() if n.endswith(".bias")
    }
    assert not any(p.requires_grad for p in freeze_(model).parameters())


def test_repeated_blocks() -> None:
    assert list(find_repeated_blocks(Model())) == ["layers.0", "layers.1", "layers.2"]
    assert find_repeated_blocks(nn.Linear(2, 2)) == {}
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert find_repeated_blocks(mixed) == {}
    assert find_repeated_blocks(nn.ModuleList([Block()])).keys() == {"0.mlp.0", "0.mlp.1"}
    pair = nn.ModuleDict(
        {"encoder": Model(), "decoder": nn.ModuleDict({"a": Block(), "b": Block()})}
    )
    names = [f"encoder.layers.{i}" for i in range(3)] + ["decoder.a", "decoder.b"]
    assert list(find_repeated_blocks(pair)) == names
    with torch.device("meta"):
        assert len(find_repeated_blocks(Model())) == 3
