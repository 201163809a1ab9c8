"""Every trained parameter of every adapter type is exported, and opens again bit for bit.

A combination that cannot be saved is refused when the adapter is attached, before any step.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers as tf

from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    LayerNormTuning,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
    load_delta,
)
from bmforge.tune.delta.types import adapter_types

_BODY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_SMALL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, Any] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **_SMALL)
    ),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**_BODY, **_SMALL, num_key_value_heads=2, attention_bias=True)
    ),
    "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**_BODY, num_labels=3)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
    "backend": lambda: tf.ArceeForCausalLM(tf.ArceeConfig(**_BODY, **_SMALL, pad_token_id=0)),
}
HEADS = {"bert": "classifier", "gpt2": "lm_head", "llama": "lm_head", "t5": "lm_head"}
OPTIONS: dict[type[Any], list[dict[str, Any]]] = {
    Lora: [
        {},
        {"rank": 3, "alpha": 5.0, "use_rslora": True},
        {"use_dora": True},
        {"bias": True, "targets": ["attn.q", "mlp.up"]},
        {"ranks": {"**.0.**": 2}},
        {"alphas": {"**.1.**": 3.0}},
        {"ranks": {"**.v_proj": 2}, "alphas": {"**.v_proj": 7.0}},
        {"targets": ["embed", "attn.v"]},
        {"targets": ["HEAD", "attn.q"]},
        {"trainable_token_indices": [9, 4], "rank": 2},
        {"targets": ["attn.k", "attn.o", "mlp.down"], "dropout": 0.1},
        {"targets": "all-linear", "rank": 1},
    ],
    Adapter: [{}, {"width": 5, "activation": "relu"}, {"targets": ["mlp.down"], "scale": 0.5}],
    LowRankAdapter: [{}, {"reduction": 8, "rank": 2}],
    ParallelAdapter: [{}, {"width": 3, "scale": 2.0}],
    Compacter: [{}, {"reduction": 4, "shared_rule": True}],
    BitFit: [{}, {"targets": ["attn.q"]}],
    IA3: [{}, {"targets": ["attn.v"]}],
    Prefix: [{"length": 3}, {"length": 2, "inner": 8}, {"length": 3, "shift_positions": True}],
    SoftPrompt: [{"length": 3}],
    LayerNormTuning: [{}],
}
MODES = ("plain", "weight 0.5", "weight 0", "head", "norms", "embedding", "frozen")


@dataclass(frozen=True)
class Case:
    family: str
    kind: type[Any]
    number: int
    mode: str

    def __str__(self) -> str:
        return f"{self.family} {self.kind.__name__} {self.number} {self.mode}".replace(" ", "-")


CASES = [
    Case(family, kind, number, mode)
    for family, kind, mode in itertools.product(MODELS, OPTIONS, MODES)
    for number in range(len(OPTIONS[kind]))
]
FEW = random.Random(4).sample(CASES, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def opened(family: str, folder: Path) -> Any:
    if not (folder / family).exists():
        torch.manual_seed(1)
        model = MODELS[family]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / family)
    return AutoModel.from_pretrained(folder / family).eval()


def logits_of(model: Any, family: str) -> torch.Tensor:
    ids = torch.arange(3, 21).view(2, 9)
    more = {"decoder_input_ids": ids[:, :5]} if family == "t5" else {}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, **more).logits
    positions = 5 if family == "t5" else 9  # a soft prompt adds positions in front
    return logits if logits.dim() < 3 else logits[:, -positions:]


def attach(case: Case, model: Any) -> Any:
    options = dict(OPTIONS[case.kind][case.number])
    head = HEADS.get(case.family, "lm_head")
    if isinstance(options.get("targets"), list):
        options["targets"] = [head if t == "HEAD" else t for t in options["targets"]]
    wholes = {"head": [head], "norms": ["norm"], "embedding": ["embed"]}
    if case.mode in wholes:
        options["modules_to_save"] = wholes[case.mode]
    return case.kind(model, **options)


def check(case: Case, folder: Path, target: Path) -> bool:
    """Attach, train, save and reopen an adapter; return False if it is refused at the start."""
    model = opened(case.family, folder)
    before = logits_of(model, case.family)
    try:
        delta = attach(case, model)
        if case.mode.startswith("weight"):
            delta.weigh_(float(case.mode.split()[1]))
    except ConfigError:
        return False
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if case.kind is LayerNormTuning and case.mode == "weight 0":
        assert not trained  # the norms have the base's values
        return False
    assert trained
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    want = logits_of(model, case.family)
    if case.mode != "weight 0":
        assert (want - before).abs().max() > 1e-4
    delta.save(target / "x")
    again = opened(case.family, folder)
    loaded = load_delta(again, target / "x", trainable=case.mode != "frozen")
    assert torch.equal(logits_of(again, case.family), want)
    assert float(loaded.weight) == float(delta.weight)
    assert set(delta.fully_trained_parameters()) <= set(loaded.fully_trained_parameters())
    extra = set(loaded.fully_trained_parameters()) - set(delta.fully_trained_parameters())
    if case.kind is SoftPrompt and case.family == "bert":  # PEFT saves it with a prompt
        assert extra <= {"classifier.weight", "classifier.bias"}
    else:
        assert not extra
    state = again.state_dict()
    is_folded = bool(delta.options.get("inner"))  # a prefix's two layers become keys and values
    parts = set(delta.names())
    for name, parameter in trained.items():
        if not (is_folded and name in parts):
            assert torch.equal(state[name], parameter), name
    if case.mode == "frozen":
        assert not any(p.requires_grad for p in loaded.parameters())
    elif not is_folded:
        names = {name for name, p in again.named_parameters() if p.requires_grad}
        if case.kind is IA3 and case.family == "gpt2":  # PEFT has one vector for q, k and v
            names &= set(trained)
        names -= extra
        assert names <= set(trained)
        assert {id(trained[n]) for n in trained} >= {id(model.get_parameter(n)) for n in names}
        missing = set(trained) - names
        # PEFT ties the `down` of the parts of a fused layer, which then has one name.
        assert all(name.endswith("down") for name in missing), missing
    loaded.save(target / "y")
    third = opened(case.family, folder)
    load_delta(third, target / "y")
    assert torch.equal(logits_of(third, case.family), want)
    return True


@pytest.mark.parametrize("case", FEW, ids=str)
def test_every_trained_parameter_opens_again(case: Case, folder: Path, tmp_path: Path) -> None:
    check(case, folder, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_all_trained_parameters_open_again(
    family: str, kind: Any, folder: Path, tmp_path: Path
) -> None:
    cases = [case for case in CASES if (case.family, case.kind) == (family, kind)]
    held = [check(case, folder, tmp_path / str(case)) for case in cases]
    print(f"{family} {kind.__name__}: {sum(held)} held, {len(held) - sum(held)} refused")


def test_a_saved_model_says_that_it_prepends_no_prompt(
    folder: Path, tmp_path: Path, caplog: Any
) -> None:
    """The model's directory has the rows; the adapter's directory prepends them."""
    model = opened("llama", folder)
    delta = SoftPrompt(model, length=3)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        want = model(input_ids=ids).logits
        model.save_pretrained(tmp_path / "model")
        assert "does not prepend them" in caplog.text
        assert AutoModel.from_pretrained(tmp_path / "model")(input_ids=ids).logits.shape[1] == 9
        delta.save(tmp_path / "adapter")
        again = opened("llama", folder)
        load_delta(again, tmp_path / "adapter")
        assert torch.equal(again.eval()(input_ids=ids).logits, want)


def test_every_type_is_tried() -> None:
    assert set(adapter_types().values()) <= {*OPTIONS}, "add the new type to OPTIONS"
