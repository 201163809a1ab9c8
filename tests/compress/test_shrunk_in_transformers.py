"""Shrunk models give the same logits in transformers, or transformers refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from masked_models import mostly_long, stir
from tiny_models import make_inputs

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of
from bmforge.compress.prune.shrink import shrink_
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.errors import ConfigError

# What transformers has; CPM-Ant's form there holds the scales in its weights.
KNOWN = [
    "bert",
    "roberta",
    "longformer",
    "gpt2",
    "gptj",
    "opt",
    "llama",
    "qwen",
    "mixtral",
    "t5",
    "vit",
]


def open_there(directory: Path) -> Any:
    """Open a directory with the class that its config names."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(directory, dtype=torch.float32).eval()


def compare(model: Any, name: str, directory: Path) -> None:
    """Logits, or hidden states, of both."""
    model.float().save_pretrained(directory)
    theirs = open_there(directory)
    inputs = {k: t.float() if t.is_floating_point() else t for k, t in make_inputs(name).items()}
    with torch.no_grad():
        ours, other = model(**inputs), theirs(**inputs)
    key = "last_hidden_state" if ours.logits is None else "logits"
    assert torch.allclose(
        ours[key] if isinstance(ours, dict) else getattr(ours, key), other[key], 1e-4, 1e-4
    )


SIZES: dict[str, dict[str, Any]] = {
    "heads": {"num_heads": 2},
    "features": {"intermediate_size": 24},
    "blocks": {"num_layers": 2},
    "hidden": {"hidden_size": 24},
    "hidden and heads": {"hidden_size": 24, "num_heads": 2},
}


@pytest.mark.parametrize("name", mostly_long(KNOWN, ["llama"]))
@pytest.mark.parametrize("kind", mostly_long(SIZES, ["hidden and heads"]))
def test_uniform_sizes_open_or_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    """What `uniform` lets pass, transformers computes alike; the rest it does not open."""
    model = stir(name)
    sizes = dict(SIZES[kind])
    if name in ("llama", "qwen", "mixtral") and "num_heads" in sizes:
        sizes["num_kv_heads"] = 1
    try:
        shrunk = shrink_(model, StructureConfig(**sizes, uniform=True))
    except ConfigError:
        shrunk = shrink_(model, StructureConfig(**sizes))
        assert not shrunk.opens_elsewhere
        if name == "vit" and kind != "blocks":  # whose class reads our name for the width of a head
            compare(model, name, tmp_path)
            return
        model.float().save_pretrained(tmp_path)
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            open_there(tmp_path)
        return
    assert shrunk.opens_elsewhere
    assert not model.config.changes
    compare(model, name, tmp_path)


@pytest.mark.parametrize("name", mostly_long(KNOWN, ["llama"]))
@pytest.mark.parametrize("what", mostly_long(["attn", "mlp", "sizes"], ["attn"]))
def test_differing_layers_are_refused(name: str, what: str, tmp_path: Path) -> None:
    """Layers of other sizes, and such that lack a half, which would be drawn at random."""
    model = stir(name, torch.float32)
    first = next(iter(blocks_of(model)))
    kept = {
        "attn": KeptIndices(attn=False),
        "mlp": KeptIndices(mlp=False),
        "sizes": KeptIndices(heads=(2, 3)),
    }[what]
    if what == "sizes" and name == "t5":
        kept = KeptIndices(features=(1, 2))
    shrunk = apply_plan_(model, PruningPlan({first: kept}))
    assert not shrunk.opens_elsewhere
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match="no file named"):
        open_there(tmp_path)


def test_which_kinds_open(tmp_path: Path) -> None:
    """Of a Llama every uniform size is published; of a Bert no other number of heads is."""
    want = {
        "llama": {"heads", "features", "blocks", "hidden", "hidden and heads"},
        "bert": {"features", "blocks", "hidden and heads"} - {"hidden and heads"},
        "t5": {"heads", "features", "blocks", "hidden", "hidden and heads"},
    }
    for name, kinds in want.items():
        found = set()
        for kind, options in SIZES.items():
            sizes = dict(options)
            if name == "llama" and "num_heads" in sizes:
                sizes["num_kv_heads"] = 1
            found |= (
                {kind} if shrink_(stir(name), StructureConfig(**sizes)).opens_elsewhere else set()
            )
        assert found == kinds, name
