"""Modules of another library in a budget: GPT-2 with its Conv1D, T5, BERT of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.surgery import find_repeated_blocks

CONFIG = EngineConfig(max_tokens=32, max_rows=4)
IDS = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(0))


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=6, n_embd=32, n_head=4, vocab_size=96, n_positions=64
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4,
            decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).eval()
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).eval()


def answer(model: Any, kind: str) -> list[torch.Tensor]:
    """Everything that is compared: ids by the library's own search, logits, gradients."""
    if kind == "bert":
        with torch.no_grad():
            return [model(input_ids=IDS).logits]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 95}
    found = [model.generate(IDS, **options), model.generate(IDS, num_beams=2, **options)]
    model.zero_grad()
    # What is recomputed may not write into a cache.
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [*found, *(p.grad.clone() for p in model.parameters())]


def smallest(model: Any) -> int:
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        Engine(model, device_budget_bytes=1, config=CONFIG)
    return int(str(caught.value).split("too small: ")[1].split()[0])


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_module_of_transformers(kind: str, more: int) -> None:
    """With the smallest budget, and with room for one block more."""
    model = make(kind)
    want = answer(model, kind)
    blocks = find_repeated_blocks(model).values()
    largest = max(sum(p.numel() * p.element_size() for p in b.parameters()) for b in blocks)
    budget = smallest(model) + more * largest
    with Engine(model, device_budget_bytes=budget, config=CONFIG) as engine:
        assert engine.plan.on_disk
        assert len(engine.plan.resident) >= more
        for got, expected in zip(answer(engine.model, kind), want, strict=True):
            assert torch.equal(got, expected)
        with pytest.raises(ConfigError, match="max_tokens=32"):
            engine.model(input_ids=IDS.repeat(1, 6))
        with pytest.raises(ConfigError, match="supports only bmforge models"):
            engine.generate(IDS)
