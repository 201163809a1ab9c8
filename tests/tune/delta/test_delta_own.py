"""Deltas on a module of one's own: what they name, train and save, and where they cannot stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.testing import assert_close
from bmforge.tune.delta import Adapter, BitFit, Lora, list_deltas, load_delta


class Net(nn.Module):
    """Blocks in a list, each a sequence, and a head."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))
        self.blocks = nn.ModuleList(pairs)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def make() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 6)


def test_single_parameters_are_trained_and_saved_whole(tmp_path: Path) -> None:
    """`modules_to_save` may name a parameter; what is trained is what is saved, and comes back."""
    net, x = make()
    delta = Lora(net, [r"[r]blocks\.\d+\.0"], rank=2, modules_to_save=["norm.bias", "head"])
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {n for n in trained if "default" not in n} == {"norm.bias", "head.weight", "head.bias"}
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    changed = net(x)
    delta.save(tmp_path)
    again, _ = make()
    opened = load_delta(again, tmp_path)
    assert_close(again(x), changed, rtol=1e-6, atol=1e-6)
    assert set(opened.fully_trained_parameters()) == set(delta.fully_trained_parameters())
    with pytest.raises(ConfigError, match="matches no module"):
        Lora(again, ["head"], name="other", modules_to_save=["nothing"])


def test_a_former_option_name_is_read(tmp_path: Path) -> None:
    """`modules_to_save` was named `train_also` in the files of earlier versions."""
    net, x = make()
    delta = Adapter(net, ["blocks.1.2"], width=2, modules_to_save=["head"])
    with torch.no_grad():
        delta.fully_trained_parameters()["head.bias"].add_(1)
    delta.save(tmp_path)
    path = tmp_path / "adapter_config.json"
    text = path.read_text()
    assert text.count('"modules_to_save"') == 1
    path.write_text(text.replace('"modules_to_save"', '"train_also"'))
    opened = load_delta(make()[0], tmp_path)
    assert set(opened.fully_trained_parameters()) == {"head.weight", "head.bias"}
    assert torch.equal(opened.model(x), net(x))


def test_rows_of_any_model() -> None:
    net, x = make()
    for seed, name in enumerate("ab"):
        delta = Adapter(net, ["blocks.1.2"], name=name, width=2, seed=seed)
        nn.init.normal_(delta.held[0].part.up_weight)
    both = net(x)
    out = net(x, adapter_names=["a", None, "b", "a"])
    plain, _ = make()
    assert_close(out[1], plain(x)[1])
    assert not torch.allclose(out[0], both[0])
    assert torch.equal(net(x), both)


@pytest.mark.parametrize("kind", [Adapter, BitFit])
@pytest.mark.parametrize("target", ["blocks.1", "blocks"])
def test_a_list_has_no_place_beside_it(kind: type[Adapter | BitFit], target: str) -> None:
    """Every child of a sequence runs: a part there would be one more step."""
    net, x = make()
    before = net(x)
    with pytest.raises(ConfigError, match="Choose one of the modules"):
        kind(net, [target])
    assert torch.equal(net(x), before)
    assert not list_deltas(net)
