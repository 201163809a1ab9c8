"""Decoding on an accelerator: steps recorded as graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.device import DeviceGraph, default_device, has_graphs
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, RequestsConfig
from bmforge.infer.engine.packed_step import PackedStep
from bmforge.infer.engine.step_tables import StepRow
from bmforge.models import Llama, LlamaConfig
from bmforge.models.pack import quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_layers": 3,
    "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def device() -> torch.device:
    found = default_device()
    if not has_graphs(found):
        pytest.skip("no graphs on this accelerator")
    return found


def build(scheme: str | None, device: torch.device) -> Any:
    model: Any = Llama.from_config(LlamaConfig(**SIZES), seed=1).eval()
    if scheme is not None:
        quantize_(model, scheme)
    return model.to(device)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_recorded_steps_have_the_same_logits(scheme: str | None, device: torch.device) -> None:
    """For prompts of several lengths; both steps read the same tokens."""
    model = build(scheme, device)
    graphs, plain = PackedStep(model, 60), PackedStep(model, 60)
    plain._can_record = False
    pages = [list(range(10 * n, 10 * n + 10)) for n in range(6)]
    texts = [[(7 * n + i) % 500 for i in range(5 + 9 * n)] for n in range(6)]
    rows = [StepRow(own, 0, len(text)) for own, text in zip(pages, texts, strict=True)]
    for step in (graphs, plain):
        step.cut()
        step.run(rows, texts, [1] * 6)
    for number in range(30):
        rows = [StepRow(row.pages, row.end, row.end + 1) for row in rows]
        if number in (10, 20):  # fewer rows
            rows = rows[1:]
        tokens = [[(31 * number + n) % 500] for n in range(len(rows))]
        found, want = (torch.cat(s.run(rows, tokens, [1] * len(rows))) for s in (graphs, plain))
        limit = 5e-2 if scheme else 1e-4
        torch.testing.assert_close(found, want, rtol=limit, atol=limit)
    assert len(graphs._graphs._recorded) == 2  # 5 and 6 rows share a graph of 8


def test_an_engine_replays_graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single requests have the tokens of steps without graphs."""
    model, replays, plain = build(None, device), [], DeviceGraph.replay
    monkeypatch.setattr(DeviceGraph, "replay", lambda self: replays.append(1) or plain(self))
    config = EngineConfig(
        max_tokens=256, requests=RequestsConfig(max_num_seqs=6, total_tokens=2048)
    )
    found = []
    for _ in range(2):
        with Engine(model, config=config) as engine:
            for n in range(3):
                options = GenerationConfig(max_new_tokens=20, eos_token_id=())
                handle = engine.submit(Request(list(range(5 + n, 25 + 9 * n)), options))
                found.append(handle.wait()[0].ids)
        assert len(replays) > 40
        monkeypatch.setattr("bmforge.infer.engine.packed_step.can_record", lambda *_: False)
        replays += [1] * 41
    assert found[:3] == found[3:]
