"""Targets: OpenDelta's own answers, common words, published names, near names."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bmforge.errors import ConfigError
from bmforge.models import GPT2, Bert, BertConfig, GPT2Config, Mixtral, MixtralConfig
from bmforge.models.hub import find_preset
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
    address,
)
from bmforge.tune.delta.address import find_places, is_excluded, matches_target

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "delta_addressing.json").read_text())
SIZES: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32},
    "Roberta": {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32},
    "T5": {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_heads": 4},
    "GPT2": {"n_embd": 16, "n_head": 4},
    "OPT": {"hidden_size": 16, "num_attention_heads": 4, "ffn_dim": 32, "word_embed_proj_dim": 16},
}
LAYERS = {"Bert": "num_hidden_layers", "Roberta": "num_hidden_layers", "GPT2": "n_layer"}


@cache
def module_names(model: str) -> list[str]:
    told = GOLDEN["models"][model]
    cls = getattr(transformers, told["class"])
    layers = told["layers"] // (2 if model == "T5" else 1)
    key = LAYERS.get(model, "num_layers" if model == "T5" else "num_hidden_layers")
    config = cls.config_class(**SIZES[model], **{key: layers}, vocab_size=32)
    with torch.device("meta"):
        return [name for name, _ in cls(config).named_modules() if name]


def hits_of(case: dict[str, Any]) -> list[str]:
    exclude = case.get("exclude_modules", ())
    return [
        name
        for name in module_names(case["model"])
        if not is_excluded(name, exclude)
        and any(matches_target(name, target) for target in case["modified_modules"])
    ]


@pytest.mark.parametrize(
    "case", GOLDEN["cases"] + GOLDEN["excluded"], ids=lambda c: f"{c['model']}-{c['count']}"
)
def test_endings_and_expressions_are_the_originals(case: dict[str, Any]) -> None:
    found = hits_of(case)
    shown = found if len(found) <= 6 else [*found[:3], *found[-3:]]
    assert (len(found), shown) == (case["count"], case["hits"])


# Common words of ours -> names of OpenDelta's common structure.
KNOWN = address.WORDS
WORDS = {"attn.q": "q@", "attn.k": "k@", "attn.v": "v@", "mlp.up": "w1@", "mlp.down": "w2@"}


@pytest.mark.parametrize("model", sorted(GOLDEN["common"]))
def test_common_words_mean_what_the_original_knew(model: str) -> None:
    """Of the recorded last block the words find the modules that it calls so."""
    for word, theirs in {**WORDS, "attn.o": "proj@"}.items():
        recorded = {
            name
            for name, (common, _) in GOLDEN["common"][model].items()
            if (
                common
                and common.split(".")[-1].rstrip("@") in (theirs.rstrip("@"), "q,k,v")
                and ".attn@." in common
                and word.startswith("attn")
                and (theirs in ("q@", "k@", "v@") or "q,k,v" not in common)
            )
            or (common and word.startswith("mlp") and common.endswith(f".ff@.{theirs}"))
        }
        assert recorded
        for group in KNOWN[word]:
            found = {n for n in recorded if any(matches_target(n, one) for one in group)}
            if any(matches_target(n, one) for n in module_names(model) for one in group):
                break
        assert found == recorded, (word, found, recorded)


def bert(**fields: Any) -> Bert:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 64,
    }
    return Bert.from_config(BertConfig(**{**sizes, **fields}), device="meta")


def gpt2() -> GPT2:
    config = GPT2Config(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=32)
    return GPT2.from_config(config, device="meta")


def test_published_names_mean_our_modules() -> None:
    model = bert()
    assert find_places(model, ["attention.self.query"]) == find_places(model, ["attn.q"])
    assert find_places(model, ["output.dense"]) == find_places(model, ["attn.o", "mlp.down"])
    assert find_places(gpt2(), ["c_attn"]) == find_places(gpt2(), ["attn.q", "attn.k", "attn.v"])
    assert find_places(gpt2(), ["h.1.attn.c_attn"], ["layers.1.attn.k_proj"]) == [
        "layers.1.attn.q_proj",
        "layers.1.attn.v_proj",
    ]


def test_words_globs_and_exclusions() -> None:
    model = gpt2()
    assert find_places(model, ["norm"]) == find_places(model, ["layers.*.*_norm", "norm"])
    assert find_places(model, ["layers.*.attn.q_proj"], ["layers.0"]) == ["layers.1.attn.q_proj"]
    assert find_places(model, ["[r]\\d\\.mlp"]) == ["layers.0.mlp", "layers.1.mlp"]
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
    )
    mixture = Mixtral.from_config(config, device="meta")
    assert find_places(mixture, ["mlp.down"]) == ["layers.0.mlp.experts"]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["attn.q_porj"], "matches no module of this GPT2. Did you mean 'attn.q_proj'"),
        (["[r](", "attn"], "not a valid regex"),
        (["layers.7.**"], "matches no module"),
    ],
)
def test_targets_that_mean_nothing(targets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_places(gpt2(), targets)
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="excluded"):
        find_places(gpt2(), ["attn.q"], ["layers"])


TYPES = {
    "LoraModel": Lora,
    "AdapterModel": Adapter,
    "LowRankAdapterModel": LowRankAdapter,
    "CompacterModel": Compacter,
    "ParallelAdapterModel": ParallelAdapter,
    "BitFitModel": BitFit,
    "SoftPromptModel": SoftPrompt,
}
SHAPES = {"bert-base-uncased": "bert-base-uncased", "t5-small": "t5-small"}


def whole(name: str) -> Any:
    model_class, config = find_preset(name)
    return model_class.from_config(config, device="meta")


RECORDED = [
    (shape, name)
    for shape in SHAPES
    for name in TYPES
    if "trainable" in GOLDEN["default_counts"][shape][name]  # else the original failed
]


@pytest.mark.parametrize(("shape", "name"), RECORDED)
def test_defaults_train_as_much_as_the_originals(shape: str, name: str) -> None:
    told = GOLDEN["default_counts"][shape][name]
    exclude = {"exclude": ("lm_head", "mlm_head", "embed_norm")} if name == "BitFitModel" else {}
    delta = TYPES[name](whole(SHAPES[shape]), **exclude)
    assert delta.count_parameters() == told["trainable"]


@pytest.mark.parametrize("kind", [*TYPES.values(), IA3, Prefix])
@pytest.mark.parametrize("shape", ["bert-base-uncased", "t5-small", "gpt2-small", "llama-2-7b"])
def test_defaults_are_few(kind: Any, shape: str) -> None:
    model = whole(shape)
    base = sum(p.numel() for p in model.parameters())
    delta = kind(model)
    share = delta.count_parameters() / base
    assert share < {Lora: 0.0035, Compacter: 0.0008}.get(kind, 0.05)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == delta.count_parameters()
