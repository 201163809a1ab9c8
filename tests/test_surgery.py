"""Finding, replacing and freezing modules by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bmforge.errors import ConfigError
from bmforge.surgery import (
    PLACES,
    eval_mode,
    find_modules,
    find_parameters,
    find_repeated_blocks,
    freeze_,
    match_glob,
    replace_module_,
    unwrap_forward_,
    wrap_forward_,
    wrappers_of,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("name", "glob", "fits"),
    [
        ("layers.0", "layers.*", True),
        ("layers.0.attn", "layers.*", False),
        ("layers.0.attn", "layers.**", True),
        ("layers.0.attn.bias", "**.bias", True),
        ("bias", "**.bias", False),
        ("layersX0", "layers.0", False),
        ("a.b+c", "a.b+c", True),
        ("q_proj", "*_proj", True),
        ("a.q_proj", "*_proj", False),
    ],
)
def test_globs(name: str, glob: str, fits: bool) -> None:
    assert match_glob(name, glob) == fits


def matches_by_parts(name: list[str], glob: list[str]) -> bool:
    """A second, plain matcher for globs whose stars are whole parts."""
    if not glob:
        return not name
    if glob[0] == "**":
        return any(matches_by_parts(name[i:], glob[1:]) for i in range(1, len(name) + 1))
    return bool(name) and glob[0] in ("*", name[0]) and matches_by_parts(name[1:], glob[1:])


@given(
    st.lists(st.sampled_from(["a", "bb", "0"]), min_size=1, max_size=5),
    st.lists(st.sampled_from(["a", "bb", "0", "*", "**"]), min_size=1, max_size=4),
)
def test_globs_against_a_plain_matcher(name: list[str], glob: list[str]) -> None:
    assert match_glob(".".join(name), ".".join(glob)) == matches_by_parts(name, glob)


def test_find() -> None:
    model = Model()
    assert list(find_modules(model, globs=["layers.*"])) == ["layers.0", "layers.1", "layers.2"]
    # In the tree's order, each once, however the globs overlap.
    both = find_modules(model, globs=["layers.1.*", "layers.*.attn"])
    assert list(both) == ["layers.0.attn", "layers.1.attn", "layers.1.mlp", "layers.2.attn"]
    assert len(find_modules(model, kind=nn.Linear)) == 10
    assert len(find_modules(model, globs=["**.mlp.**"], kind=nn.Linear)) == 6
    assert find_parameters(model, ["embed.*"])["embed.weight"] is model.embed.weight
    with pytest.raises(ConfigError, match=re.escape("pattern 'layers.*.atn' matches nothing.")):
        find_modules(model, globs=["layers.*.atn"])
    with pytest.raises(ConfigError, match=r"Did you mean 'embed\.weight'"):
        find_parameters(model, ["embd.weight"])


def test_replace() -> None:
    model, new = Model(), nn.Identity()
    old = model.layers[1].mlp[0]
    assert replace_module_(model, "layers.1.mlp.0", new) is old
    assert model.layers[1].mlp[0] is new
    replace_module_(model, "head", new)
    assert model.head is new


def test_freeze() -> None:
    model = freeze_(Model(), ["embed.*", "**.bias"])
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"embed.weight"} | {
        n for n, _ in model.named_parameters() if n.endswith(".bias")
    }
    assert not any(p.requires_grad for p in freeze_(model).parameters())


def test_repeated_blocks() -> None:
    assert list(find_repeated_blocks(Model())) == ["layers.0", "layers.1", "layers.2"]
    assert find_repeated_blocks(nn.Linear(2, 2)) == {}
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert find_repeated_blocks(mixed) == {}
    assert find_repeated_blocks(nn.ModuleList([Block()])).keys() == {"0.mlp.0", "0.mlp.1"}
    pair = nn.ModuleDict(
        {"encoder": Model(), "decoder": nn.ModuleDict({"a": Block(), "b": Block()})}
    )
    names = [f"encoder.layers.{i}" for i in range(3)] + ["decoder.a", "decoder.b"]
    assert list(find_repeated_blocks(pair)) == names
    with torch.device("meta"):
        assert len(find_repeated_blocks(Model())) == 3


class Scale(nn.Module):
    """Multiplies by its factor, and by what `more` says."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor, inner: float = 1.0) -> torch.Tensor:
        return x * self.factor * inner


def add(amount: float, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs) + amount


def double(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return 2 * inner(*args, **kwargs)


def use_own_factor(module: Scale, inner: Callable[..., Any], /, x: torch.Tensor) -> Any:
    return inner(x) + module.factor


WRAPPERS = {"part": double, "views": partial(add, 3.0), "recompute": double}


@pytest.mark.parametrize("order", list(permutations(WRAPPERS)), ids="-".join)
def test_where_wrappers_stand_does_not_depend_on_who_came_first(order: tuple[str, ...]) -> None:
    """((x * 5) * 2 + 3) * 2, whatever the order of the calls; arguments go through by any name."""
    module = Scale(5.0)
    for place in order:
        wrap_forward_(module, WRAPPERS[place], place)
    assert wrappers_of(module) == list(WRAPPERS.items())
    assert [place for place, _ in wrappers_of(module)] == sorted(order, key=PLACES.index)
    assert module(torch.tensor(1.0)).item() == 26.0
    assert module(torch.tensor(1.0), inner=2.0).item() == 46.0


@pytest.mark.parametrize("order", list(permutations(WRAPPERS)), ids="-".join)
def test_wrappers_come_off_in_any_order(order: tuple[str, ...]) -> None:
    """What is left computes alone; at the end nothing of it is in the module."""
    module, left = Scale(5.0), dict(WRAPPERS)
    before = set(vars(module))
    for place, wrapper in WRAPPERS.items():
        wrap_forward_(module, wrapper, place)
    for place in order:
        assert unwrap_forward_(module, place) is left.pop(place)
        value = 5.0
        for wrapper in left.values():
            value = 2 * value if wrapper is double else value + 3.0
        assert module(torch.tensor(1.0)).item() == value
    assert wrappers_of(module) == []
    assert set(vars(module)) == before
    assert module.forward.__func__ is Scale.forward


def test_a_forward_of_the_modules_own_comes_back() -> None:
    """A patch that was there before stays inside, and is left when ours goes."""
    module = Scale(5.0)
    module.forward = own = lambda x: x + 1  # type: ignore[method-assign]
    wrap_forward_(module, double, "part")
    assert module(torch.tensor(1.0)).item() == 4.0
    unwrap_forward_(module, "part")
    assert module.forward is own


def test_a_copy_has_wrappers_of_its_own() -> None:
    """They work on the copy's parameters, and come off it alone."""
    module = Scale(5.0)
    wrap_forward_(module, partial(use_own_factor, module), "views")
    wrap_forward_(module, double, "recompute")
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.factor.fill_(7.0)
    one = torch.tensor(1.0)
    assert (module(one).item(), other(one).item()) == (20.0, 28.0)
    unwrap_forward_(other, "recompute")
    assert (module(one).item(), other(one).item()) == (20.0, 14.0)
    module.to(torch.float64)
    assert copy.deepcopy(Scale(2.0))(one).item() == 2.0


def test_hooks_and_compiling_stay_outside() -> None:
    """A hook sees what the outermost wrapper returns; a compiled module runs all of them."""
    module, seen = Scale(5.0), []
    module.register_forward_hook(lambda own, args, out: seen.append(out.item()))
    wrap_forward_(module, partial(add, 3.0), "views")
    wrap_forward_(module, double, "part")
    assert module(torch.tensor(1.0)).item() == 13.0
    assert seen == [13.0]
    compiled = Scale(5.0)
    wrap_forward_(compiled, partial(use_own_factor, compiled), "views")
    wrap_forward_(compiled, partial(add, 3.0), "tokens")
    compiled.compile(backend="eager", fullgraph=True)
    assert compiled(torch.tensor(1.0)).item() == 13.0


def test_what_cannot_be_wrapped_says_so() -> None:
    """A place that is taken, one that is free, and a forward that somebody has replaced since."""
    module = Scale(5.0)
    wrap_forward_(module, double, "part")
    with pytest.raises(ConfigError, match="Scale already has a wrapper with order_key='part'"):
        wrap_forward_(module, double, "part")
    with pytest.raises(
        ConfigError, match=r"no wrapper with order_key='views' \(existing: \['part'\]"
    ):
        unwrap_forward_(module, "views")
    assert module(torch.tensor(1.0)).item() == 10.0
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="replaced after it was wrapped"):
        wrap_forward_(module, double, "views")


def test_eval_mode_gives_every_module_its_own_mode_back() -> None:
    """Also one that was in evaluation beneath a parent in training, and also after an error."""
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).train()
    model[0].eval()
    modes = [module.training for module in model.modules()]
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(KeyError), eval_mode(model):
        raise KeyError
    assert [module.training for module in model.modules()] == modes
