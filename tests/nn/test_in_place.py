"""Products in the place of a tensor that nobody else has: the same bits, and no other changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bmforge.nn import in_place as in_place_module
from bmforge.nn.in_place import add_temporary, multiply_temporary
from bmforge.nn.mlp import ACTIVATIONS, MLP, MLPSpec

LARGE = (4, in_place_module._FEWEST_NUMBERS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("ours", "plain"),
    [(multiply_temporary, torch.mul), (add_temporary, torch.add)],
    ids=["mul", "add"],
)
def test_the_first_ones_memory_takes_the_result(
    ours: Callable[[Tensor, Tensor], Tensor], plain: Callable[[Tensor, Tensor], Tensor]
) -> None:
    for shape in (LARGE, LARGE[1:]):
        temporary, other = draw(*LARGE), draw(*shape, seed=1)
        want = plain(temporary, other)
        with torch.no_grad():
            got = ours(temporary, other)
        assert torch.equal(got, want)
        assert got.data_ptr() == temporary.data_ptr()


def test_where_it_stays_as_it_was() -> None:
    """With gradients, another dtype, a wider other, few numbers, or what was not made anew."""
    temporary, other = draw(*LARGE), draw(*LARGE, seed=1)
    before = temporary.clone()
    assert torch.equal(multiply_temporary(temporary, other), before * other)
    with torch.no_grad():
        assert multiply_temporary(temporary, other.double()).dtype == torch.float64
        assert multiply_temporary(temporary, other.expand(2, *LARGE)).shape == (2, *LARGE)
        assert torch.equal(
            multiply_temporary(temporary[:1, :9], other[:1, :9]), (before * other)[:1, :9]
        )
        assert torch.equal(
            multiply_temporary(temporary, other, made_of=temporary.view(LARGE)), before * other
        )
        assert torch.equal(torch.func.vmap(multiply_temporary)(temporary, other), before * other)
    assert torch.equal(temporary, before)


def test_an_activation_that_returns_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hook on the gate keeps is not overwritten."""
    monkeypatch.setitem(ACTIVATIONS, "linear", lambda x: x)
    mlp = MLP(64, MLPSpec(LARGE[1] // 64, activation="linear", gated=True))
    kept: list[Tensor] = []
    mlp.gate_proj.register_forward_hook(lambda *args: kept.append(args[2]))  # type: ignore[union-attr]
    x = draw(128, 64)
    with torch.no_grad():
        mlp(x)
        assert torch.equal(kept[0], mlp.gate_proj(x))  # type: ignore[misc]
