"""Engines of the transformers backend: the smallest budget, and requests that run together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, generate
from bmforge.infer.engine import Request
from bmforge.models import AutoModel
from bmforge.models.transformers.small_copy import build_small_copy

transformers = pytest.importorskip("transformers")

CONFIG = EngineConfig(max_tokens=32, max_rows=2)


@pytest.fixture(scope="module", params=["gemma2", "mamba", "glm4_moe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    build_small_copy(
        transformers.AutoConfig.for_model(request.param), "language_model"
    ).save_pretrained(path)
    return path


def tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randint(5, 150, (rows, count), generator=torch.Generator().manual_seed(0))


def test_smallest_budget_has_the_same_numbers(directory: Path) -> None:
    model = AutoModel.from_pretrained(directory, backend="transformers")
    with pytest.raises(ConfigError, match="too small") as caught:
        Engine(directory, device_budget_bytes=1, config=CONFIG, backend="transformers")
    least = int(str(caught.value).split("too small: ")[1].split()[0].replace(",", ""))
    ids = tokens(2, 7)
    with (
        torch.no_grad(),
        Engine(
            directory, device_budget_bytes=least, config=CONFIG, backend="transformers"
        ) as engine,
    ):
        logits = engine.model(ids).logits
        # Mapped and read weights are aligned differently, which changes the order of summation.
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        got = engine.generate(ids, max_new_tokens=6)
    assert torch.equal(got, generate(model, ids, max_new_tokens=6))


def test_requests_are_answered_as_alone(directory: Path) -> None:
    model = AutoModel.from_pretrained(directory, backend="transformers")
    prompts = [tokens(1, 6)[0].tolist(), tokens(1, 11)[0].tolist()]
    with Engine(model, config=EngineConfig(max_rows=2)) as engine:
        options = GenerationConfig(max_new_tokens=5)
        handles = [engine.submit(Request(prompt, options)) for prompt in prompts]
        answers = [handle.wait(300)[0].ids for handle in handles]
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = generate(model, torch.tensor([prompt]), max_new_tokens=5)[0, len(prompt) :]
        assert list(answer) == wanted.tolist()
