"""A sequence's answer depends neither on the rest of the batch nor on the cache's contents.

Dynamic and longrope frequencies depend on the length. Where they change, cached keys are
recomputed, so that every token is that of a call without a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, generate
from bmforge.models import AutoModel, Llama, LlamaConfig

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "init_std": 0.3},
    **{"num_layers": 2, "num_heads": 4},
}
# The numbers of positions at which the rotary frequencies change are 16.
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"kind": "linear", "factor": 2.0},
    "dynamic": {"kind": "dynamic", "factor": 2.0},
    "yarn": {"kind": "yarn", "factor": 4.0, "original_seq_len": 16},
    "longrope": {
        "kind": "longrope",
        "factor": 4.0,
        "original_seq_len": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 8.0],
    },
}


def build(name: str) -> Llama:
    more = {} if SCALINGS[name] is None else {"rope_scaling": SCALINGS[name]}
    config = LlamaConfig(**SIZES, **more, max_seq_len=16 if name == "dynamic" else 64)
    return Llama.from_config(config, seed=3).double().eval()


@pytest.mark.parametrize("lengths", [(5, 14, 9), (15, 20, 3), (12, 30)])
@pytest.mark.parametrize("name", SCALINGS)
def test_rows_do_not_depend_on_each_other(name: str, lengths: tuple[int, ...]) -> None:
    model, width = build(name), max(lengths)
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(2, 64, (n,), generator=generator) for n in lengths]
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long).unbind()
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    options = {"max_new_tokens": 8, "eos_token_id": None}
    together = generate(model, ids, mask, **options)[:, width:]
    for row, answer in zip(rows, together, strict=True):
        alone = generate(model, row[None], **options)[0, len(row) :]
        assert answer.tolist() == alone.tolist()


@pytest.mark.parametrize("length", [3, 12, 15, 16, 20])
@pytest.mark.parametrize("name", SCALINGS)
def test_cached_tokens_are_those_of_whole_calls(name: str, length: int) -> None:
    """Each step of greedy decoding is the argmax of a call with all tokens and no cache."""
    model = build(name)
    ids = torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(length))
    want = decode_without_cache(model, ids, 18)
    assert generate(model, ids, max_new_tokens=18, eos_token_id=None).tolist() == want.tolist()
    with Engine(model, config=EngineConfig(max_tokens=64)) as engine:
        options = GenerationConfig(max_new_tokens=18, eos_token_id=None)
        twin = Request(ids[0, 1:].tolist(), options)
        handles = [engine.submit(r) for r in (Request(ids[0].tolist(), options), twin)]
        answers = [handle.wait(120)[0].ids for handle in handles]
    assert list(answers[0]) == want[0, length:].tolist()
    assert list(answers[1]) == decode_without_cache(model, ids[:, 1:], 18)[0, length - 1 :].tolist()


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_tokens_across_the_border_are_transformers_without_a_cache(
    name: str, backend: Any, tmp_path: Path
) -> None:
    tf = pytest.importorskip("transformers")
    model: Any = build(name).float()
    model.save_pretrained(tmp_path)
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).double().eval()
    ours: Any = AutoModel.from_pretrained(tmp_path, backend=backend).double().eval()
    ids = torch.randint(2, 64, (1, 11), generator=torch.Generator().manual_seed(1))
    want = decode_without_cache(theirs, ids, 12, use_cache=False)
    assert generate(ours, ids, max_new_tokens=12, eos_token_id=None).tolist() == want.tolist()


def test_beams_and_padded_rows_cross_the_border() -> None:
    """A batch whose rows cross at different steps, in a beam search."""
    model = build("longrope")
    ids = torch.randint(2, 64, (2, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None, "num_beams": 3}
    together = generate(model, ids, mask, **options)[:, 14:]
    for row, first in ((0, 0), (1, 5)):
        alone = generate(model, ids[row : row + 1, first:], **options)[0, 14 - first :]
        assert together[row].tolist() == alone.tolist()


def decode_without_cache(model: Any, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=ids, **options).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    return ids
