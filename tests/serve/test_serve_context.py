"""The context of a server is the model's limit, bounded by memory, and refused above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.cli.main import main
from bmforge.cli.serve_context import choose_context, key_value_bytes
from bmforge.errors import ConfigError
from bmforge.infer.engine.workspace import find_workspace
from bmforge.models import GPT2, T5, GPT2Config, Llama, LlamaConfig, T5Config

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
CONFIG = LlamaConfig(vocab_size=64, max_seq_len=2048, num_layers=2, num_kv_heads=2, **SIZES)
MODEL = Llama.from_config(CONFIG, device="meta")
WEIGHTS = sum(p.numel() * 4 for p in MODEL.parameters())
TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, width, bytes


def memory_of_step(rows: int, tokens: int) -> int:
    work = find_workspace(MODEL, rows, tokens, 128)
    return work.cache_bytes + work.step_bytes


def test_bytes_of_a_token() -> None:
    assert key_value_bytes(CONFIG) == TOKEN


@given(st.integers(0, 1 << 34), st.integers(1, 64), st.booleans())
def test_the_context_fits_the_memory(memory: int, rows: int, is_planned: bool) -> None:
    context = choose_context(MODEL, None, memory, rows, is_planned)
    assert context.tokens is not None
    assert 2 <= context.tokens <= 2048
    if is_planned:
        assert 1024 <= context.tokens <= max(1024, memory // 4 // (TOKEN * rows))
        step = memory_of_step(rows, context.tokens)
        assert context.tokens == 1024 or step <= memory / 3
        if 1024 < context.tokens < min(2048, memory // 4 // (TOKEN * rows)):  # the step limits it
            assert memory_of_step(rows, context.tokens + 8) > memory / 3
    else:
        fits = (memory - WEIGHTS) // 2 // TOKEN
        assert context.tokens == max(2, min(2048, fits))
        assert context.total_tokens is not None
        assert context.tokens <= context.total_tokens <= max(2, min(rows * context.tokens, fits))
    assert ("maximum sequence length is 2048" in context.reason) == (context.tokens < 2048)


def test_what_is_given() -> None:
    assert choose_context(MODEL, 512, 1 << 40, 4, False).tokens == 512
    for requested in (0, 1, 2049, -1):
        with pytest.raises(ConfigError, match=f"context={requested}"):
            choose_context(MODEL, requested, 1 << 40, 4, False)
    learned = GPT2.from_config(
        GPT2Config(vocab_size=64, max_seq_len=128, num_layers=1, **SIZES), device="meta"
    )
    assert choose_context(learned, None, 1 << 40, 4, False).tokens == 128
    apart = T5.from_config(
        T5Config(vocab_size=64, num_layers=1, head_dim=8, **SIZES), device="meta"
    )
    assert choose_context(apart, None, 1 << 40, 4, False).tokens is None


@pytest.mark.parametrize("context", ["0", "8192"])
def test_the_command_refuses_it(model_directory: Path, context: str, capsys: Any) -> None:
    assert main(["serve", str(model_directory), "--port", "0", "--context", context]) == 2
    assert f"context={context}" in capsys.readouterr().err
