"""A model with a delta compiles whole, and trains with the numbers of the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bmforge.infer import generate
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig
from bmforge.testing.changed_models import run_step_of
from bmforge.testing.tolerance import assert_close
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Delta,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
)

pytestmark = pytest.mark.long

EVERYWHERE = ["embed", "attn.q", "attn.v", "mlp.up", "mlp.down", "lm_head"]
TYPES: dict[str, Callable[[Any], Delta]] = {
    "lora": lambda m: Lora(m, EVERYWHERE, rank=2),
    "lora with magnitudes": lambda m: Lora(m, rank=2, use_dora=True),
    "adapter": lambda m: Adapter(m, width=3),
    "low-rank": lambda m: LowRankAdapter(m, reduction=4, rank=2),
    "compacter": lambda m: Compacter(m, reduction=4, division=2),
    "parallel": lambda m: ParallelAdapter(m, width=3),
    "bitfit": BitFit,
    "ia3": IA3,
    "prefix": lambda m: Prefix(m, length=3),
    "deep prefix": lambda m: Prefix(m, length=3, inner=4),
    "soft-prompt": lambda m: SoftPrompt(m, length=2),
}
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 32,
}


def tiny(family: str, dtype: torch.dtype = torch.float64) -> Any:
    if family == "GPT2":
        return GPT2.from_config(GPT2Config(**SIZES), dtype=dtype)
    sizes = LlamaConfig(**SIZES, num_kv_heads=2, intermediate_size=24)
    return Llama.from_config(sizes, dtype=dtype)


@pytest.fixture(autouse=True)
def no_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Half a minute each through the code generator, so of those that compute most differently.
TO_CODE = ["lora", "compacter", "deep prefix", "soft-prompt"]
CASES = [
    *((kind, family, "eager") for kind in TYPES for family in ("GPT2", "Llama")),
    *((kind, "Llama", "inductor") for kind in TO_CODE),
]


@pytest.mark.parametrize(("kind", "family", "backend"), CASES)
def test_a_model_with_a_delta_compiles_whole(kind, family, backend):
    # Generated code sums in another order what norms and rotations round to fp32 in any dtype.
    model = tiny(family, torch.float64 if backend == "eager" else torch.float32)
    delta = TYPES[kind](model)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=draw), alpha=0.1)
    ids = torch.randint(50, (2, 12), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    want = run_step_of(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close(run_step_of(compiled, batch, model), want)
    assert {name.removeprefix("grad/") for name in want} >= {n for n, _ in delta.named_parameters()}


def test_a_whole_graph_refuses_rows_of_the_prompt_that_are_there_already():
    model = tiny("GPT2")
    SoftPrompt(model, length=2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    own = torch.tensor([[50, 51, 3, 4, 5, 6]])
    assert_close(compiled(input_ids=own[:, 2:]).logits, model(input_ids=own).logits)
    with pytest.raises(RuntimeError, match="prepends the prompt itself"):
        compiled(input_ids=own)


def test_a_compiled_model_with_a_soft_prompt_generates():
    model = tiny("Llama").eval()
    SoftPrompt(model, length=2)
    ids = torch.tensor([[3, 4, 5, 6]])
    want = generate(model, ids, max_new_tokens=4, do_sample=False)
    model.compile(backend="eager")
    assert torch.equal(generate(model, ids, max_new_tokens=4, do_sample=False), want)
