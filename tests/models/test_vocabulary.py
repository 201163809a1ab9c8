"""Resized vocabularies compute transformers' logits and gradients, and are written as such."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers as tf
from tiny_models import TINY, build

from bmforge.errors import ConfigError
from bmforge.models import AutoModel, Model, load_weights_
from bmforge.parallel import Layout, parallelize
from bmforge.testing import run_distributed
from bmforge.tune.delta import Lora, SoftPrompt

_BODY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
# name -> (class, config, backend)
KINDS: dict[str, tuple[Any, Any, str]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**_BODY), "native"),
    "llama-tied": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**_BODY, tie_word_embeddings=True),
        "native",
    ),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(**_GPT2), "native"),
    "gptj": (tf.GPTJForCausalLM, tf.GPTJConfig(**_GPT2, rotary_dim=4), "native"),
    "bert": (tf.BertForMaskedLM, tf.BertConfig(**_BODY), "native"),
    "bert-untied": (
        tf.BertForMaskedLM,
        tf.BertConfig(**_BODY, tie_word_embeddings=False),
        "native",
    ),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config(**_T5), "native"),
    "t5-untied": (
        tf.T5ForConditionalGeneration,
        tf.T5Config(**_T5, tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
        "native",
    ),
    "bert-classifier": (tf.BertForSequenceClassification, tf.BertConfig(**_BODY), "native"),
    "backend llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**_BODY), "transformers"),
    "backend gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(**_GPT2), "transformers"),
    "backend bert": (tf.BertForMaskedLM, tf.BertConfig(**_BODY), "transformers"),
    "backend bart": (
        tf.BartForConditionalGeneration,
        tf.BartConfig(**_BART, decoder_start_token_id=2),
        "transformers",
    ),
    "backend olmo2": (tf.Olmo2ForCausalLM, tf.Olmo2Config(**_BODY), "transformers"),
    "backend gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig(**_BODY, num_key_value_heads=2, head_dim=8),
        "transformers",
    ),
}
SIZES = [(None, 48), (70, None), (70, 32), (50, None)]
CASES = [(kind, size) for kind in KINDS for size in SIZES]
FEW = random.Random(1).sample(CASES, 12)


def opened(directory: Path, backend: str) -> Any:
    return AutoModel.from_pretrained(directory, backend=backend, dtype=torch.float32).eval()


def logits_of(model: Any, ids: torch.Tensor, is_apart: bool) -> torch.Tensor:
    more = {"decoder_input_ids": ids[:, :4]} if is_apart else {}
    logits: torch.Tensor = model(input_ids=ids, **more).logits
    return logits


def check(kind: str, size: tuple[int | None, int | None], folder: Path) -> None:
    cls, config, backend = KINDS[kind]
    torch.manual_seed(0)
    source = cls(config).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    source.save_pretrained(folder / "base")
    ours, theirs = opened(folder / "base", backend), cls.from_pretrained(folder / "base").eval()
    frozen = next(iter(ours.parameters()))
    frozen.requires_grad_(False)
    ours.resize_token_embeddings(*size)
    theirs.resize_token_embeddings(*size, mean_resizing=False)
    rows = theirs.get_input_embeddings().num_embeddings
    assert ours.config.vocab_size == rows == ours.embed.num_embeddings
    common, is_apart = min(rows, 64), source.config.is_encoder_decoder
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        want, got = (logits_of(m, ids, is_apart) for m in (theirs, ours))
        if want.shape[-1] > 2:
            assert want.shape == got.shape
            want, got = want[..., :common], got[..., :common]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    ours.save_pretrained(folder / "resized")
    again = cls.from_pretrained(folder / "resized").eval()
    new = torch.tensor([[rows - 1, 3, 4, rows - 2, 5, 6, 7]])
    with torch.no_grad():
        want, got = logits_of(again, new, is_apart), logits_of(ours, new, is_apart)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        back = opened(folder / "resized", backend)
        torch.testing.assert_close(logits_of(back, new, is_apart), got, rtol=0, atol=0)
    if want.shape[-1] > 2:  # ties are kept: transformers' gradients
        labels = new.clone()
        for model in (ours, again):
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            model(input_ids=new, labels=labels).loss.backward()
        wanted = again.get_input_embeddings().weight.grad
        torch.testing.assert_close(ours.embed.weight.grad, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "size"), FEW)
def test_resized_models_are_transformers(
    kind: str, size: tuple[int | None, int | None], tmp_path: Path
) -> None:
    check(kind, size, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size"), [case for case in CASES if case not in FEW])
def test_all_resized_models_are_transformers(
    kind: str, size: tuple[int | None, int | None], tmp_path: Path
) -> None:
    check(kind, size, tmp_path)


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_is_resized_or_refused(family: str, tmp_path: Path) -> None:
    """Old tokens keep their logits, new rows are the means, and the written model opens again."""
    model: Any = build(family)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if family in ("vit", "cpm2", "cpm-ant", "cpm_ant"):
        try:
            model.resize_token_embeddings(80)
        except ConfigError:
            assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
            return
    else:
        model.resize_token_embeddings(80)
    for name, parameter in model.named_parameters():
        old = before[name]
        assert torch.equal(parameter[: old.shape[0]], old), name
        if parameter.shape != old.shape:
            new = parameter.detach()[old.shape[0] :]
            torch.testing.assert_close(new, old.mean(0, keepdim=True).expand_as(new))
    model.save_pretrained(tmp_path / "x")
    again = type(model).from_pretrained(tmp_path / "x", dtype=torch.float64)
    assert again.config.vocab_size == 80
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_random_rows_and_a_smaller_size_again() -> None:
    model: Model = build("llama")
    model.resize_token_embeddings(80, mean_resizing=False)
    new = model.embed.weight.detach()[61:]
    assert 0.1 < float(new.std()) < 0.3  # init_std is 0.2
    model.resize_token_embeddings(61)
    assert torch.equal(model.embed.weight, build("llama").embed.weight)


def compute(directory: Path, layout: Layout) -> torch.Tensor:
    model, files = AutoModel.describe_pretrained(directory)
    parallelize(model, layout)
    load_weights_(model, files)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[79, 3, 4, 78]])).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


@pytest.mark.parametrize("layout", [Layout(zero=3), Layout(tp=2)], ids=str)
def test_resized_models_on_layouts(layout: Layout, tmp_path: Path) -> None:
    model = build("llama").float().eval()
    model.resize_token_embeddings(80)
    model.save_pretrained(tmp_path / "x")
    with torch.no_grad():
        want = model(input_ids=torch.tensor([[79, 3, 4, 78]])).logits
    for got in run_distributed(compute, 2, tmp_path / "x", layout):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def refuse_after_layout() -> str:
    model = build("llama")
    parallelize(model, Layout(zero=3))
    with pytest.raises(ConfigError, match="Call resize_token_embeddings before"):
        model.resize_token_embeddings(80)
    return "refused"


def test_refusals() -> None:
    assert run_distributed(refuse_after_layout, 1) == ["refused"]
    model = build("llama")
    for bad in (0, -3, 2.5, True):
        with pytest.raises(ConfigError, match="new_num_tokens"):
            model.resize_token_embeddings(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pad_to_multiple_of"):
        model.resize_token_embeddings(70, 0)
    with pytest.raises(ConfigError, match="padding token"):
        build("roberta").resize_token_embeddings(1)
    delta = Lora(model, ["embed"], rank=2)
    with pytest.raises(ConfigError, match="embed has an adapter"):
        model.resize_token_embeddings(80)
    delta.remove()
    prompt = SoftPrompt(model, length=3)
    with pytest.raises(ConfigError, match="soft prompt"):
        model.resize_token_embeddings(80)
    prompt.remove()
    Lora(model, rank=2)
    model.resize_token_embeddings(80)
    assert model.embed.num_embeddings == 80
