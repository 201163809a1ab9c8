"""Peak memory above the imports, as a control group counts it, stays within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.infer.engine import runtime
from bmforge.infer.engine.request import Request, RequestsConfig
from bmforge.infer.generation import generate
from bmforge.models import T5, Llama, LlamaConfig, T5Config
from bmforge.testing.limited_engine import ALLOWANCE, CASES, MODELS, Case, run_limited


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[1:])]
)
def test_peak_is_within_the_budget(tmp_path: Path, case: Case) -> None:
    MODELS[case.model]().save_pretrained(tmp_path)
    found = run_limited(tmp_path, case)
    assert found["peak"] <= ALLOWANCE * found["budget"], found
    assert found["planned"] <= found["budget"], found
    assert (case.share == 1.0) == (found["moved"] == 0), found


def test_bf16_needs_at_most_six_tenths_of_the_budget_of_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without a library for 16 bits, whose generated code would need more memory."""
    monkeypatch.setattr(runtime, "lacks_optimized_product", lambda dtype: True)
    MODELS["llama"]().save_pretrained(tmp_path)
    config = EngineConfig(max_tokens=256)
    least = []
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigError, match="too small") as caught:
            Engine(tmp_path, device_budget_bytes=1, dtype=dtype, config=config)
        least.append(int(str(caught.value).split("too small: ")[1].split()[0]))
    assert least[1] <= 0.6 * least[0], least


def test_the_default_length_is_that_of_the_model() -> None:
    """A decoder's max_seq_len; T5 reads longer sources, as in transformers."""
    size = {"vocab_size": 64, "hidden_size": 32, "num_heads": 2, "num_layers": 2, "max_seq_len": 24}
    llama = Llama.from_config(LlamaConfig(**size), device="meta")
    t5 = T5.from_config(T5Config(**size), device="meta")
    assert EngineConfig().tokens_of(llama) == 24
    assert EngineConfig().tokens_of(t5) == 1024


def test_an_engine_for_requests_takes_single_calls(tmp_path: Path) -> None:
    """Its plan has room for one whole prompt, so a batch of prompts is refused by name."""
    llama, t5 = MODELS["llama"](), MODELS["t5"]()
    config = EngineConfig(max_rows=4, max_tokens=64, only_requests=True)
    config = replace(config, requests=RequestsConfig(max_num_batched_tokens=64))
    assert config.call_rows_of(llama) == 1
    assert config.call_rows_of(t5) == 4  # whose requests run as batches of their own
    llama.save_pretrained(tmp_path)
    with Engine(tmp_path, device_budget_bytes=1 << 29, config=config) as engine:
        ids = torch.ones(2, 40, dtype=torch.long)
        assert engine.model(ids[:1]).logits.shape[:2] == (1, 40)
        with pytest.raises(ConfigError, match=r"2 sequences.*max_rows=1"):
            engine.model(ids)
        with pytest.raises(ConfigError, match=r"2 sequences.*max_rows=1"):
            generate(engine.model, ids[:, :8], max_new_tokens=2)
        assert engine.model(ids[:, :32]).logits.shape[:2] == (2, 32)  # 64 tokens, as planned
        handles = [engine.submit(Request([1, 2, 3 + row])) for row in range(6)]
        assert all(handle.wait()[0].ids for handle in handles)


def test_embeddings_of_an_engine_for_requests_share_passes(tmp_path: Path) -> None:
    """Short inputs are batched up to the planned number of tokens if blocks are streamed."""
    MODELS["small"]().save_pretrained(tmp_path)
    config = EngineConfig(max_rows=4, max_tokens=128, only_requests=True)
    with pytest.raises(ConfigError, match="too small") as caught:
        Engine(tmp_path, device_budget_bytes=1, config=config)
    least = int(str(caught.value).split("too small: ")[1].split()[0])
    inputs = [[row + 1, 5, 6] for row in range(8)]
    with Engine(tmp_path, device_budget_bytes=least, config=config) as engine:
        assert engine.plan.on_disk
        together = engine.submit_embed(inputs).result(60)
    with Engine(tmp_path) as engine:
        alone = torch.cat([engine.submit_embed([row]).result(60) for row in inputs])
    torch.testing.assert_close(together, alone)
