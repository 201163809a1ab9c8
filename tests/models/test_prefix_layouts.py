"""Prefixes in whole models: with a cache as without, and on every kind of layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, TINY, build, family_of, make_inputs
from torch import nn

from bmforge.infer.decoder import make_cache
from bmforge.models.stack import find_heads
from bmforge.nn.prefix import KeyValuePrefix
from bmforge.parallel import Layout
from bmforge.testing import assert_close
from bmforge.testing.batches import make_labels
from bmforge.testing.layouts import check_layout

SEQ2SEQ = ["t5", "cpm2", "eva"]


def add_prefixes_(model: nn.Module) -> Any:
    """Put five keys and values before those of every attention."""
    for name, (_, kv_heads) in find_heads(model):
        attn: Any = model.get_submodule(name)
        with torch.device(attn.q_proj.weight.device):
            attn.prefix = KeyValuePrefix(kv_heads, 5, attn.head_dim, 0.5).to(
                attn.q_proj.weight.dtype
            )
    return model


@dataclass(frozen=True)
class Prefixed:
    """A family with prefixes everywhere; it builds as the family does."""

    name: str

    def from_config(self, config: Any, **options: Any) -> Any:
        """Build it on meta."""
        return add_prefixes_(family_of(self.name).from_config(config, **options))


@pytest.mark.parametrize("name", DECODERS + SEQ2SEQ)
def test_with_a_cache_as_without(name: str) -> None:
    """What a cache holds are tokens; the prefix comes before them at every call."""
    model, stack = build(name), "decoder.layers" if name in SEQ2SEQ else "layers"
    inputs = make_inputs(name)
    bare = model(**inputs).logits
    torch.manual_seed(0)
    add_prefixes_(model)
    for parameter_name, parameter in model.named_parameters():
        if ".prefix." in parameter_name:
            nn.init.normal_(parameter)
    key = "decoder_input_ids" if name in SEQ2SEQ else "input_ids"
    with torch.no_grad():
        want = model(**inputs).logits
        assert (want - bare).abs().max() > 1e-3
        given = inputs.pop(key)
        cache, parts = make_cache(model.get_submodule(stack), 9), []
        more = {"position_ids": torch.arange(9)[None]} if name == "glm" else {}
        for piece in (slice(0, 4), slice(4, 5), slice(5, None)):
            cut = {k: t[:, piece] for k, t in more.items()}
            parts.append(model(**{key: given[:, piece]}, **inputs, **cut, cache=cache).logits)
    assert cache.length == given.shape[1]
    if name != "cpm_ant":  # whose text is seen whole
        assert_close(torch.cat(parts, 1), want)


def check(name: str, world: int, **fields: Any) -> None:
    """Train on a layout and on one process."""
    model = family_of(name).from_config(TINY[name], device="meta")
    inputs = make_inputs(name, rows=4, length=8)
    labels = make_labels(model, inputs)
    if name in SEQ2SEQ:
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)[:, :7].contiguous()
    if name in ("llama", "bert"):
        inputs["attention_mask"] = torch.ones(4, 8, dtype=torch.long)
        inputs["attention_mask"][0, -3:] = 0
    rows = 2 if "pp" in fields else 1
    layout = Layout(**fields)
    check_layout(
        Prefixed(name), TINY[name], inputs, labels, world=world, layout=layout, micro_batches=rows
    )


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_context_parallel(name: str, method: str) -> None:
    """Plain causal rows, masked ones of grouped heads, and a trained bias."""
    check(name, 2, cp=2, cp_method=method)


@pytest.mark.parametrize("name", ["llama", "longformer"])
def test_tensor_parallel(name: str) -> None:
    """A process has the prefix of its key-value heads."""
    check(name, 2, tp=2)


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, {"tp": 2}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (4, {"tp": 4}),
        (2, {"cp": 2}),
        (2, {"cp": 2, "cp_method": "ring"}),
        (2, {"cp": 2, "cp_method": "ulysses"}),
        (2, {"pp": 2}),
        (2, {"zero": 3}),
    ],
)
def test_train_all_families(name: str, world: int, fields: dict[str, Any]) -> None:
    """All of them; four processes share two key-value heads."""
    if name == "vit" and fields.get("sequence_parallel"):
        pytest.skip("five tokens: tp does not divide them")
    check(name, world, **fields)
