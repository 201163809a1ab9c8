"""PEFT beside us: outputs, gradients, three steps, and files in both directions."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from bmforge.models import GPT2, T5, Bert, Llama, Mixtral
from bmforge.testing.reference_pair import Twin, make_twin
from bmforge.testing.tolerance import assert_close
from bmforge.tune.delta import Lora, list_deltas, load_delta

LOOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
BASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (
        GPT2,
        hf.GPT2LMHeadModel,
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "llama": (
        Llama,
        hf.LlamaForCausalLM,
        {
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        },
    ),
    "bert": (
        Bert,
        hf.BertForSequenceClassification,
        {
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3},
        },
    ),
    "t5": (
        T5,
        hf.T5ForConditionalGeneration,
        {
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
            **{"num_heads": 4, "decoder_start_token_id": 0},
        },
    ),
    "mixtral": (
        Mixtral,
        hf.MixtralForCausalLM,
        {
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"num_local_experts": 4},
        },
    ),
}
QUIET = {"dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "dropout_rate": 0.0}
QUIET |= {"attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
QUIET |= {"attn_pdrop": 0.0, "classifier_dropout": 0.0}


@dataclass(frozen=True)
class Case:
    """One delta of PEFT's."""

    base: str
    config: Any
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gpt2-lora": Case("gpt2", peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"])),
    "gpt2-dora": Case("gpt2", peft.LoraConfig(r=4, target_modules=["c_attn"], use_dora=True)),
    "gpt2-embed": Case("gpt2", peft.LoraConfig(r=4, target_modules=["wte", "c_attn"])),
    "gpt2-ia3": Case(
        "gpt2",
        peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
    ),
    "gpt2-prefix": Case(
        "gpt2", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ),
    "gpt2-prompt": Case(
        "gpt2", peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ),
    "llama-patterns": Case(
        "llama",
        peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"v_proj": 2},
            alpha_pattern={"layers.1.mlp.down_proj": 3},
            use_rslora=True,
        ),
    ),
    "llama-head": Case("llama", peft.LoraConfig(r=4, target_modules=["lm_head", "k_proj"])),
    "llama-dora": Case(
        "llama", peft.LoraConfig(r=4, target_modules=["o_proj", "up_proj"], use_dora=True)
    ),
    "llama-ia3": Case(
        "llama",
        peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "llama-prefix": Case(
        "llama", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ),
    "bert-saved": Case(
        "bert",
        peft.LoraConfig(
            r=4, target_modules=["query", "value"], lora_bias=True, task_type="SEQ_CLS"
        ),
    ),
    "t5-lora": Case("t5", peft.LoraConfig(r=4, target_modules=["q", "v", "wo"])),
    "mixtral-lora": Case("mixtral", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])),
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Twin]:
    made = {}
    for name, (ours, theirs, fields) in BASES.items():
        known = theirs.config_class().to_dict()
        quiet = {k: v for k, v in QUIET.items() if k in known}
        folder = tmp_path_factory.mktemp(name)
        made[name] = make_twin(ours, theirs, {**fields, **quiet}, folder)
    return made


def make_batch(base: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 64, (2, 9), generator=generator)
    if base == "bert":
        return {"input_ids": ids, "labels": torch.tensor([0, 2])}
    if base == "t5":
        return {"input_ids": ids, "labels": ids[:, :5].contiguous()}
    return {"input_ids": ids, "labels": ids}


def their_delta(twin: Twin, config: Any) -> Any:
    """Return PEFT's model, its numbers drawn: nothing is at its start."""
    base = type(twin.reference).from_pretrained(twin.directory, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return made


def loss_of(case: Case, model: Any, batch: dict[str, Tensor]) -> Tensor:
    if isinstance(case.config, peft.PromptTuningConfig) and not hasattr(model, "peft_config"):
        # Ours leaves the first word out, which the prompt's last row could say: by PEFT's rule.
        logits = model(batch["input_ids"]).logits[:, case.config.num_virtual_tokens - 1 : -1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return model(**batch).loss


@pytest.mark.parametrize("name", CASES)
def test_three_steps_and_files(twins: dict[str, Twin], tmp_path: Path, name: str) -> None:
    case = CASES[name]
    twin, batch = twins[case.base], make_batch(case.base)
    theirs = their_delta(twin, case.config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = type(twin.model).from_pretrained(twin.directory)
    delta = load_delta(model, tmp_path / "theirs", name="mine")
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == delta.count_parameters()
    delta.save(tmp_path / "back")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    optimizers = [
        torch.optim.SGD(trained, 0.1),
        torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 0.1),
    ]
    for _ in range(3):
        losses = loss_of(case, model, batch), loss_of(case, theirs, batch)
        assert_close(*losses, **LOOSE)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    delta.save(tmp_path / "after")
    theirs.save_pretrained(tmp_path / "their_after")
    got, want = (
        load_file(tmp_path / folder / "adapter_model.safetensors")
        for folder in ("after", "their_after")
    )
    assert_close(got, want, **LOOSE)


@pytest.mark.parametrize(
    ("base", "targets", "options"),
    [
        ("gpt2", ["attn.q", "attn.v", "mlp.down"], {}),
        ("gpt2", ["layers.0.attn.k_proj", "embed"], {"use_rslora": True}),
        ("llama", ["attn.q", "attn.v"], {"ranks": {"layers.1.attn.v_proj": 2}}),
        ("bert", ["attn.q"], {"modules_to_save": ["classifier"], "use_dora": True}),
        ("t5", ["attn.q", "cross_attn.v_proj"], {}),
    ],
)
def test_ours_opens_in_peft_and_here(
    twins: dict[str, Twin], tmp_path: Path, base: str, targets: list[str], options: Any
) -> None:
    twin, batch = twins[base], make_batch(base)
    model = type(twin.model).from_pretrained(twin.directory)
    delta = Lora(model, targets, rank=3, alpha=6, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in delta.tensors().values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    delta.save(tmp_path, base=str(twin.directory), license="mit", scores={"f1": 0.5})
    read = {n: t for n, t in batch.items() if n != "labels"}
    if base == "t5":
        read["decoder_input_ids"] = batch["labels"]
    want = model(**read).logits
    theirs = type(twin.reference).from_pretrained(twin.directory, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    assert_close(opened(**read).logits, want, **LOOSE)
    again = type(twin.model).from_pretrained(twin.directory)
    loaded = Lora.load(again, tmp_path)
    assert torch.equal(again(**read).logits, want)
    assert {n: t.shape for n, t in loaded.tensors().items()} == {
        n: t.shape for n, t in delta.tensors().items()
    }
    assert list(list_deltas(again)) == ["default"]
    card = (tmp_path / "README.md").read_text()
    assert "license: mit" in card
    assert f"{delta.count_parameters():,}" in card
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.parametrize("stacks", [["gate_up_proj", "down_proj"], ["down_proj"]])
def test_experts_of_peft(twins: dict[str, Twin], tmp_path: Path, stacks: list[str]) -> None:
    """Its Loras on stacked experts compute the same here, gradients too; they are saved as ours."""
    twin, batch = twins["mixtral"], make_batch("mixtral")
    named = [f"mlp.experts.{stack}" for stack in stacks]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=named)
    theirs = their_delta(twin, config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = type(twin.model).from_pretrained(twin.directory)
    delta = load_delta(model, tmp_path / "theirs")
    read = {n: t for n, t in batch.items() if n != "labels"}
    want = theirs(**read).logits
    assert_close(model(**read).logits, want, **LOOSE)
    for one in (model, theirs):
        one(**read).logits.square().mean().backward()
    found = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    for layer in ("0", "1"):
        part = getattr(model.layers[layer].mlp.experts, delta.name)
        grads = [g for n, g in found.items() if f"layers.{layer}.mlp.experts" in n]
        sizes = {tuple(p.shape) for n, p in delta.named_parameters() if n.endswith("down_proj_up")}
        assert sizes == {(4, 32, 2)}
        mine = part.down_proj_up.grad
        same = [
            g.reshape(32, 2, 4).permute(2, 0, 1) for g in grads if tuple(g.shape) == (32, 8)
        ] + [g.reshape(4, 2, 32).mT for g in grads if tuple(g.shape) == (8, 32)]
        assert any(torch.allclose(mine, one, rtol=1e-4, atol=1e-7) for one in same)
    delta.save(tmp_path / "ours")
    again = type(twin.model).from_pretrained(twin.directory)
    load_delta(again, tmp_path / "ours")
    assert torch.equal(again(**read).logits, model(**read).logits)
