"""Recorded decoding steps, with a recorder of torch's operations, which drops all Python code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bmforge.infer.engine import packed_step
from bmforge.infer.engine.packed_step import PackedStep
from bmforge.infer.engine.step_graphs import StepGraphs, _round_rows, can_record
from bmforge.infer.engine.step_tables import StepRow
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, Qwen, QwenConfig
from bmforge.models.pack import quantize_
from bmforge.tune.delta import Lora

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 1024,
}  # fmt: skip
NARROW = {"num_kv_heads": 2, "intermediate_size": 96}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: Llama.from_config(LlamaConfig(**SIZES, **NARROW), seed=1),
    "qwen3": lambda: Qwen.from_config(QwenConfig(**SIZES, **NARROW, head_dim=16), seed=1),
    "gpt2": lambda: GPT2.from_config(GPT2Config(**SIZES, dropout=0.0), seed=1),
    "int4": lambda: quantize_(Llama.from_config(LlamaConfig(**SIZES, **NARROW), seed=1), "int4"),
}


class Trace(TorchDispatchMode):
    """Records the operations of a function, which are then replayed without its Python code."""

    def __init__(self, run: Callable[[], Tensor], like: Any = None) -> None:
        super().__init__()
        self._calls: list[Any] = []
        # The C++ kernels, which no dispatcher sees, are not used while torch compiles.
        with patch("torch.compiler.is_compiling", return_value=True), self:
            self._recorded = self.output = run()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        values: dict[int, Any] = {}

        def find(value: Any) -> Any:
            return values.get(id(value), value)

        for function, args, kwargs, old in self._calls:
            new = function(*tree_map(find, args), **tree_map(find, kwargs))
            values |= zip(map(id, tree_leaves(old)), tree_leaves(new), strict=True)
        self.output = find(self._recorded)


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bmforge.infer.engine.step_graphs.has_graphs", lambda _: True)
    monkeypatch.setattr(packed_step, "can_batch_sequences", lambda _: True)
    monkeypatch.setattr(packed_step, "is_host", lambda _: False)
    monkeypatch.setattr(
        packed_step, "StepGraphs", lambda run, device: StepGraphs(run, device, Trace)
    )


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 90, (3 + 7 * n,), generator=generator).tolist() for n in range(count)]


def decode(step: PackedStep, texts: list[list[int]], steps: int) -> Tensor:
    """Return the logits of decoding steps whose rows come, end and grow, (all rows, V)."""
    step.cut()
    pages = [list(range(20 * n, 20 * n + 20)) for n in range(len(texts))]
    rows = [StepRow(own, 0, len(text)) for own, text in zip(pages, texts, strict=True)]
    out = step.run(rows, texts, [1] * len(texts))
    found = []
    for number in range(steps):
        tokens = [[int(scores[-1].argmax())] for scores in out]
        rows = [StepRow(row.pages, row.end, row.end + 1) for row in rows]
        if number == 4:  # fewer rows than before, in the same graph or another one
            rows, tokens = rows[1:], tokens[1:]
        out = step.run(rows, tokens, [1] * len(rows))
        found += out
    return torch.cat(found)


@pytest.mark.parametrize("cache", [None, torch.int8], ids=["cache", "int8 cache"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_have_the_same_logits(with_graphs: None, name: str, cache: Any) -> None:
    texts = prompts(5)
    model = MODELS[name]().eval()
    graphs, plain = (PackedStep(model, 100, cache) for _ in range(2))
    plain._can_record = False
    found, want = (decode(step, texts, 8) for step in (graphs, plain))
    assert len(graphs._graphs._recorded) == 2
    limit = 5e-2 if name == "int4" or cache else 2e-5  # other kernels round activations otherwise
    torch.testing.assert_close(found, want, rtol=limit, atol=limit)


def test_longer_texts_have_wider_tables(with_graphs: None) -> None:
    model = MODELS["llama"]().eval()
    graphs, plain = PackedStep(model, 40), PackedStep(model, 40)
    plain._can_record = False
    text = torch.arange(250).remainder(90).tolist()
    outs = []
    for step in (graphs, plain):
        pages = list(range(30, 0, -1))
        step.run([StepRow(pages, 0, 250)], [text], [1])
        outs.append(
            torch.cat(
                [step.run([StepRow(pages, n, n + 1)], [[n % 90]], [1])[0] for n in range(250, 262)]
            )
        )
    assert set(graphs._graphs._recorded) == {(1, 16), (1, 32)}
    torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5)


def test_changed_values_are_read_and_changed_structures_are_not_recorded(with_graphs: None) -> None:
    model = MODELS["llama"]().eval()
    step = PackedStep(model, 100)
    decode(step, prompts(2), 4)
    with torch.no_grad():
        model.layers["0"].attn.q_proj.weight.mul_(1.5)
    plain = PackedStep(model, 100)
    plain._can_record = False
    found, want = (decode(each, prompts(2), 4) for each in (step, plain))
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    calls = []
    model.layers["1"].mlp.register_forward_hook(lambda *_: calls.append(1))
    step.check_for_changes()
    decode(step, prompts(2), 4)
    assert len(calls) == 5


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def change_training(model: Any) -> None:
    model.layers["0"].train()


def change_module(model: Any) -> None:
    model.layers["0"].mlp = Custom()


def change_adapter(model: Any) -> None:
    Lora(model, ["attn.q_proj"], rank=2)


def change_forward(model: Any) -> None:
    model.layers["1"].mlp.forward = lambda x: 2 * x


def change_mix(model: Any) -> None:
    own = model.layers["1"].attn.attention_fn
    model.layers["1"].attn.attention_fn = lambda *args: own(*args)


def change_class(model: Any) -> None:
    model.__class__ = type("Other", (type(model),), {"__module__": "another_package"})


def change_head(model: Any) -> None:
    model.project_last = lambda x: 2 * x


@pytest.mark.parametrize(
    "change",
    [
        change_training, change_module, change_adapter, change_forward, change_mix, change_class,
        change_head,
    ],
)  # fmt: skip
def test_python_code_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]
) -> None:
    device = torch.device("cpu")
    model = MODELS["llama"]().eval()
    assert not can_record(model, device)
    monkeypatch.setattr("bmforge.infer.engine.step_graphs.has_graphs", lambda _: True)
    assert can_record(model, device)
    change(model)
    assert not can_record(model, device)


def test_a_step_that_cannot_be_recorded_runs_without_a_graph(
    with_graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Any, like: Any = None) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(
        packed_step, "StepGraphs", lambda run, device: StepGraphs(run, device, refuse)
    )
    model = MODELS["llama"]().eval()
    step, plain = PackedStep(model, 100), PackedStep(model, 100)
    plain._can_record = False
    found, want = (decode(each, prompts(3), 4) for each in (step, plain))
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    assert [record.getMessage() for record in caplog.records if "graph" in record.getMessage()] == [
        "decoding steps cannot be recorded as a graph, so they are slower: operation not "
        "permitted when stream is capturing"
    ]


def test_rows_are_rounded_to_few_sizes() -> None:
    sizes = [_round_rows(count) for count in range(1, 257)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 4, *range(16, 257, 16)]
