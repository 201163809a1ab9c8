"""A model divided over accelerators and the host; every test skips itself where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.models import Llama, LlamaConfig
from bmforge.testing import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]

CONFIG = EngineConfig(max_tokens=16, max_rows=4)
IDS = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, num_heads=4, intermediate_size=128, num_layers=12,
        max_seq_len=64,
    )  # fmt: skip
    model = Llama.from_config(config, seed=1).eval()
    model.save_pretrained(tmp_path)
    return model, tmp_path


def check_divided(model: Any, folder: Path, devices: list[Any]) -> None:
    """With blocks that come and go, and with all there, the numbers are the model's."""
    with pytest.raises(ConfigError, match="on every device is enough") as caught:
        Engine(folder, device_budget_bytes=1, devices=devices, config=CONFIG)
    enough = int(str(caught.value).split("too small: ")[1].split()[0])
    want = model(input_ids=IDS).logits
    for budget in (enough, None):
        with (
            Engine(folder, device_budget_bytes=budget, devices=devices, config=CONFIG) as engine,
            torch.no_grad(),
        ):
            assert budget is None or engine.plan.elsewhere
            for _ in range(3):  # the copies of one pass begin in the pass before
                got = engine.model(input_ids=IDS.to(engine.device)).logits
                assert got.device == engine.device
                assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
            text = engine.generate(IDS, max_new_tokens=8, num_beams=2)
            assert torch.equal(text.cpu(), generate(model, IDS, max_new_tokens=8, num_beams=2))


@torch.no_grad()
def test_an_accelerator_and_the_host(saved: tuple[Any, Path]) -> None:
    check_divided(*saved, [0, "cpu"])


@torch.no_grad()
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_two_accelerators(saved: tuple[Any, Path]) -> None:
    check_divided(*saved, [0, 1])
