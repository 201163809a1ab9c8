"""`load_state_dict` of tensors that OpenDelta saved with `torch.save(model.state_dict())`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmforge.compat.opendelta import AdapterModel, AutoDeltaConfig, AutoDeltaModel, LoraModel
from bmforge.testing import assert_close


class Attention(nn.Module):
    """Module of a program, with CPM-Bee's names."""

    def __init__(self) -> None:
        super().__init__()
        self.project_q, self.project_v = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.project_q(x) + self.project_v(x)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_lora_tensors_are_loaded_by_their_old_names() -> None:
    """As `text_generation.py` of CPM-Bee does, with a file of the delta alone."""
    model = nn.Sequential(Attention())
    plain = nn.Sequential(Attention())
    plain.load_state_dict(model.state_dict())
    LoraModel(model, lora_r=4, lora_alpha=8, modified_modules=["project_q"], backend="hf")
    saved = {
        "0.project_q.lora.lora_A": draw(4, 8),
        "0.project_q.lora.lora_B": draw(8, 4),
    }
    result = model.load_state_dict(dict(saved), strict=False)
    assert not result.unexpected_keys
    weight = plain[0].project_q.weight
    weight.data += 2.0 * saved["0.project_q.lora.lora_B"] @ saved["0.project_q.lora.lora_A"]
    x = draw(3, 8)
    assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_adapter_tensors_are_loaded_inside_another_module() -> None:
    model = nn.ModuleDict({"plm": Attention()})
    AdapterModel(model["plm"], bottleneck_dim=4, modified_modules=["project_v"], backend="hf")
    base = "plm.project_v.adapter.modulelist."
    saved = {
        f"{base}down_proj.weight": draw(4, 8),
        f"{base}down_proj.bias": draw(4),
        f"{base}up_proj.weight": draw(8, 4),
        f"{base}up_proj.bias": draw(8),
    }
    result = model.load_state_dict(dict(saved), strict=False)
    assert not result.unexpected_keys
    x, down, up = draw(3, 8), *(list(saved.values())[i : i + 2] for i in (0, 2))
    plm = model["plm"]
    out = nn.functional.linear(x, plm.project_v.weight, plm.project_v.bias)
    inner = nn.functional.gelu(nn.functional.linear(out, *down), approximate="tanh")
    want = plm.project_q(x) + out + nn.functional.linear(inner, *up)
    assert_close(plm(x), want, rtol=1e-5, atol=1e-5)


def test_unknown_names_and_wrong_shapes_stay_unexpected() -> None:
    model = nn.Sequential(Attention())
    LoraModel(model, lora_r=4, modified_modules=["project_q"], backend="hf")
    saved = {"0.project_q.lora.lora_A": draw(3, 8), "0.project_k.lora.lora_A": draw(4, 8)}
    result = model.load_state_dict(dict(saved), strict=False)
    assert set(result.unexpected_keys) == set(saved)


class Wide(nn.Module):
    """One linear layer, wide enough for a compacter, with the same weights every time."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.load_state_dict({"project.weight": draw(64, 64), "project.bias": draw(64)})

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


def attach(model: nn.Module, kind: str) -> Any:
    fields = {"delta_type": kind, "modified_modules": ["project"]}
    return AutoDeltaModel.from_config(AutoDeltaConfig.from_dict(fields), backbone_model=model)


PARTS, SIDES = ("weight", "bias"), ("down", "up")
LOW_RANK = ("W_left", "W_right", "b")
# OpenDelta's names inside a module with one linear layer, by type.
INNER = {
    "lora": ["lora.lora_A", "lora.lora_B"],
    "adapter": [f"adapter.modulelist.{p}_proj.{k}" for p in ("down", "up") for k in PARTS],
    "low_rank_adapter": [
        f"low_rank_adapter.{p}_sampler.{k}"
        for p in ("down", "up")
        for k in ("W_left", "W_right", "b")
    ],
    "compacter": [
        f"compactor.{p}_sampler.{k}"
        for p in ("down", "up")
        for k in ("W_left", "W_right", "b", "phm_rule")
    ],
    "bitfit": ["bias"],
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", INNER)
def test_the_state_and_the_file_have_opendeltas_names(
    kind: str, wrapped: bool, tmp_path: Path
) -> None:
    """A directory with only OpenDelta's two files gives the same outputs again."""
    torch.manual_seed(0)
    model = Wide()
    root = nn.ModuleDict({"plm": model}) if wrapped else model
    delta = attach(model, kind)
    with torch.no_grad():
        for parameter in delta.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, want = draw(3, 64), model(draw(3, 64))
    delta.freeze_module(root, set_state_dict=True)
    names = {f"{'plm.' if wrapped else ''}project.{name}" for name in INNER[kind]}
    assert set(root.state_dict()) == names
    delta.save_finetuned(tmp_path)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert set(saved) == {f"project.{name}" for name in INNER[kind]}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).unlink()
    again = Wide()
    AutoDeltaModel.from_finetuned(tmp_path, again)
    assert_close(again(x), want, rtol=1e-5, atol=1e-6)
    loaded = Wide()
    attach(loaded, kind)
    assert not loaded.load_state_dict(saved, strict=False).unexpected_keys
    assert_close(loaded(x), want, rtol=1e-5, atol=1e-6)


def test_the_file_of_a_bitfit_has_the_whole_bias(tmp_path: Path) -> None:
    """OpenDelta's biases replace those of the backbone."""
    model = Wide()
    own = model.project.bias.detach().clone()
    delta = attach(model, "bitfit")
    nn.init.constant_(next(delta.parameters()), 0.5)
    delta.save_finetuned(tmp_path)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_close(saved["project.bias"], own + 0.5, rtol=0, atol=1e-7)
    assert_close(model.state_dict()["project.bias"], own + 0.5, rtol=0, atol=1e-7)
