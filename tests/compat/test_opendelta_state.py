"""`load_state_dict` of tensors that OpenDelta saved with `torch.save(model.state_dict())`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bmforge.compat.opendelta import AdapterModel, LoraModel
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
