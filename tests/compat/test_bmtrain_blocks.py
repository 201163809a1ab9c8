"""Parameters, blocks and lists of them: the behaviours of BMTrain's own tests, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import old_programs as old
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain.parameter import whole
from bmforge.errors import CheckpointError, ConfigError, DistributedError
from bmforge.testing import run_distributed

SHAPE = (3, 5)
ROUTES = [
    "init_method",
    "given",
    "wrapper",
    "wrapper_of_drawn",
    "list",
    "modules",
    "block",
    "block_of_plain",
    "pipe_list",
]


def drawn() -> nn.Module:
    """What torch draws."""
    torch.manual_seed(33)
    return old.PlainLinear(*SHAPE)


def by_route(route: str) -> tuple[nn.Module, str]:
    """A model with the same layer, made in another way, and the prefix of the layer's names."""
    torch.manual_seed(33)
    if route == "given":
        model: Any = bmt.DistributedModule()
        weight = torch.empty(SHAPE[1], SHAPE[0])
        nn.init.xavier_normal_(weight)
        model.weight = bmt.DistributedParameter(weight)
        model.bias = bmt.DistributedParameter(torch.zeros(SHAPE[1]))
        return model, ""
    if route == "wrapper":
        return bmt.BMTrainModelWrapper(old.PlainLinear(*SHAPE)), ""
    if route == "wrapper_of_drawn":
        return bmt.BMTrainModelWrapper(drawn()), ""
    if route == "block_of_plain":
        return bmt.Block(old.PlainLinear(*SHAPE)), ""
    layers = [old.OldLinear(*SHAPE), old.OldLinear(*SHAPE)]
    model, prefix = {
        "init_method": lambda: (layers[0], ""),
        "list": lambda: (bmt.TransformerBlockList(layers), "0."),
        "modules": lambda: (nn.ModuleList([bmt.CheckpointBlock(m) for m in layers]), "0."),
        "block": lambda: (bmt.Block(layers[0]), ""),
        "pipe_list": lambda: (bmt.PipelineTransformerBlockList(layers), "0."),
    }[route]()
    bmt.init_parameters(model)
    return model, prefix


def initialise(pipe_size: int) -> dict[str, dict[str, torch.Tensor]]:
    bmt.init_distributed(seed=0, pipe_size=pipe_size)
    found = {}
    for route in ROUTES:
        model, prefix = by_route(route)
        state = model.state_dict() if "pipe" not in route else values(model)
        found[route] = {key: state[prefix + key] for key in ("weight", "bias")}
    return found


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "pipe_size"), [(1, 1), (2, 1), (4, 2)])
def test_init_parameters_draws_what_torch_draws(world: int, pipe_size: int) -> None:
    want = drawn().state_dict()
    for found in run_distributed(initialise, world, pipe_size):
        for route in ROUTES:
            for key, value in want.items():
                assert torch.equal(found[route][key], value), (route, key)


def save_and_load(folder: str) -> None:
    bmt.init_distributed(seed=0)
    torch.manual_seed(33)
    plain = old.PlainGPT()
    torch.manual_seed(33)
    model = old.OldGPT()
    bmt.init_parameters(model)
    path = Path(folder, "model.pt")
    bmt.save(model, path)
    saved = torch.load(path, weights_only=True)
    want = plain.state_dict()
    assert list(saved) == list(want)
    assert all(torch.equal(saved[key], want[key]) for key in want)
    torch.manual_seed(1)
    for form in ("list", "modules", "normal"):
        other = old.OldGPT(form=form)
        bmt.init_parameters(other)
        bmt.load(other, path)
        assert all(torch.equal(value, want[key]) for key, value in other.state_dict().items())
        assert other.load_state_dict(want).missing_keys == []
    data = old.batch(0)
    torch.testing.assert_close(model(*data[:2]), plain(*data[:2]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_saved_files_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    run_distributed(save_and_load, world, str(tmp_path))


def save_pipeline(folder: str) -> None:
    bmt.init_distributed(seed=0, pipe_size=2)
    torch.manual_seed(33)
    model = old.OldGPT(form="pipe")
    bmt.init_parameters(model)
    bmt.save(model, Path(folder, "model.pt"))
    other = old.OldGPT(form="pipe")
    bmt.load(other, Path(folder, "model.pt"))
    assert all(torch.equal(v, values(other)[k]) for k, v in values(model).items())


def test_a_pipeline_saves_all_stages(tmp_path: Path) -> None:
    run_distributed(save_pipeline, 2, str(tmp_path))
    torch.manual_seed(33)
    want, saved = old.PlainGPT().state_dict(), torch.load(tmp_path / "model.pt")
    assert list(saved) == list(want)
    assert all(torch.equal(saved[key], want[key]) for key in want)


def wrong_files(folder: str) -> list[str]:
    bmt.init_distributed()
    model, path, said = old.OldGPT(layers=1), Path(folder, "wrong.pt"), []
    state = model.state_dict()
    state["extra"] = state.pop("head.bias")
    state["embed.bias"] = state["embed.bias"][:-1]
    if bmt.rank() == 0:
        torch.save(state, path)
    bmt.synchronize()
    for name in (path, Path(folder, "none.pt")):
        with pytest.raises(CheckpointError) as error:
            bmt.load(model, name)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_all_keys_that_do_not_fit_are_named(world: int, tmp_path: Path) -> None:
    for fits, reads in run_distributed(wrong_files, world, str(tmp_path)):
        assert all(key in fits for key in ("head.bias", "extra", "embed.bias", "wrong.pt"))
        assert "none.pt" in reads


class Returns(bmt.DistributedModule):
    """Gives back what it was given, once a parameter has passed by."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = bmt.DistributedParameter(torch.ones(4))
        self.ends = 0

    def forward(self, *values: Any, keyword: Any = None) -> Any:
        out = values[0] if len(values) == 1 and keyword is None else values
        self.ends += 1
        return list(out) if keyword == "list" else out


def outputs() -> None:
    bmt.init_distributed()
    block, x = bmt.Block(Returns()), torch.ones(2)
    assert torch.is_tensor(block(x))
    for count in (2, 10):
        assert isinstance(block(*[x] * count), tuple)
        assert len(block(*[x] * count)) == count
    assert isinstance(block((x,)), tuple)
    as_list = block(x, keyword="list")
    assert isinstance(as_list, tuple)
    assert len(as_list) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_and_keywords(world: int) -> None:
    run_distributed(outputs, world)


class Counting(nn.Module):
    """A layer that counts its runs, at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = bmt.nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.count += 1
        return y


def recompute(level: int) -> None:
    bmt.init_distributed()
    layers = [bmt.Block(Counting(), zero_level=level) for _ in range(10)]
    for index, layer in enumerate(layers):
        bmt.init_parameters(layer)
        layer.linear.weight.requires_grad_(index > 4)
        layer.linear.bias.requires_grad_(index > 4)
    x = torch.randn(2, 8)
    y = x
    for index, layer in enumerate(layers):
        y = layer(y)
        assert y.requires_grad == (index > 4)
    y.sum().backward()
    assert [layer.count for layer in layers] == [1] * 5 + [2] * 5
    assert layers[0].linear.weight.grad is None
    assert layers[9].linear.weight.grad is not None
    assert x.grad is None
    kept = bmt.Block(Counting(), use_checkpoint=False)
    kept(x).sum().backward()
    assert kept.count == 1


@pytest.mark.parametrize(("world", "level"), [(1, 3), (2, 3), (2, 2)])
def test_recompute_runs_frozen_blocks_once_and_others_twice(world: int, level: int) -> None:
    run_distributed(recompute, world, level)


def freezing() -> None:
    bmt.init_distributed(seed=3)
    first, second = old.OldLinear(8, 8), old.OldLinear(8, 8)
    blocks = bmt.TransformerBlockList([bmt.Block(first), bmt.Block(second)])
    bmt.init_parameters(blocks)

    def run() -> list[list[str]]:
        blocks(torch.rand(1, 10, 8) * 100).sum().backward()
        table = bmt.inspect.format_summary(bmt.inspect.inspect_model(blocks, "*"))
        return [line.split()[-2:] for line in table.split("\n")[1:]]

    first.bias.requires_grad_(False)
    one = run()
    assert one[1] == ["0.0000", "0.0000"]
    first.weight.requires_grad_(False)
    first.bias.requires_grad_(True)
    two = run()
    assert two[0] == one[0]  # what was there is kept
    assert two[1] != one[1]
    first.weight.requires_grad_(True)
    first.bias.requires_grad_(False)
    three = run()
    assert three[0] != two[0]
    assert three[1] == two[1]


@pytest.mark.parametrize("world", [1, 2])
def test_freezing_after_wrapping(world: int) -> None:
    run_distributed(freezing, world)


class Dropping(bmt.DistributedModule):
    """Nothing but dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x)


def dropout() -> torch.Tensor:
    bmt.init_distributed(seed=1)
    block, x = bmt.Block(Dropping()), torch.ones(64, requires_grad=True)
    for _ in range(5):
        assert block.train() is block
        assert (block(x) == 0).any()
        assert block.eval() is block
        assert not (block(x) == 0).any()
    first = block.train()(x)
    first.sum().backward()
    assert torch.equal(x.grad, first)  # recomputed with the same mask
    assert len(set(bmt.store.allgather_objects(torch.randn(()).item()))) == 1
    return first.detach()


def test_dropout_differs_between_processes_and_follows_train_and_eval() -> None:
    one, two = run_distributed(dropout, 2)
    assert not torch.equal(one, two)


class Three(bmt.DistributedModule):
    """Three in, three out, two constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = old.OldLinear(8, 8)

    def forward(self, a: Any, b: Any, c: Any, d: Any, *, e: Any) -> Any:
        return self.linear(a), b * d + c, c * e


def several_hidden() -> None:
    bmt.init_distributed()
    layers = [Three() for _ in range(3)]
    for layer in layers:
        bmt.init_parameters(layer)
    given = [torch.randn(2, 8, requires_grad=True) for _ in range(3)]
    hidden, seen = tuple(given), []
    for layer in layers:
        seen.append(hidden)
        hidden = layer(*hidden, 2.0, e=3.0)
    blocks = bmt.TransformerBlockList([bmt.Block(layer) for layer in layers], num_hidden=3)
    *found, one, two, three = blocks(*given, 2.0, e=3.0, return_hidden_states=True)
    for got, want in zip(found, hidden, strict=True):
        torch.testing.assert_close(got, want)
    for got, number in zip((one, two, three), range(3), strict=True):
        torch.testing.assert_close(got, torch.stack([states[number] for states in seen]))
    wanted = torch.autograd.grad(sum(h.sum() for h in hidden), given)
    plain = blocks(*given, 2.0, e=3.0)
    sum(h.sum() for h in plain).backward()
    for leaf, want in zip(given, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, want)
    assert len(blocks) == 3
    assert [blocks[0], blocks["1"], *blocks[2:]] == list(blocks)


@pytest.mark.parametrize("world", [1, 2])
def test_lists_thread_several_values(world: int) -> None:
    run_distributed(several_hidden, world)


def accumulate() -> None:
    bmt.init_distributed(seed=2)
    for form in ("list", "modules", "normal"):
        model = old.OldGPT(form=form)
        bmt.init_parameters(model)
        grads = []
        for _ in range(2):
            old.loss_of(model, old.batch(0), nn.CrossEntropyLoss()).backward()
            grads.append([whole(p, p.grad).clone() for p in model.parameters()])
        for once, twice in zip(*grads, strict=True):
            torch.testing.assert_close(2 * once, twice)


@pytest.mark.parametrize("world", [1, 2])
def test_two_backwards_add_up(world: int) -> None:
    run_distributed(accumulate, world)


def one_module_twice() -> None:
    bmt.init_distributed(seed=2)
    layer = old.OldLinear(8, 8)
    bmt.init_parameters(layer)
    weight, bias = whole(layer._parameters["weight"]), whole(layer._parameters["bias"])
    blocks = bmt.TransformerBlockList([layer, layer])
    assert blocks[0] is not blocks[1]
    x = torch.ones(1, 8) + torch.arange(8.0)
    blocks(x).square().sum().backward()
    weight.requires_grad_(True)
    y = nn.functional.linear(nn.functional.linear(x, weight, bias), weight, bias)
    y.square().sum().backward()
    got = layer._parameters["weight"]
    torch.testing.assert_close(whole(got, got.grad), weight.grad * bmt.world_size())


@pytest.mark.parametrize("world", [1, 2])
def test_one_module_may_come_twice(world: int) -> None:
    run_distributed(one_module_twice, world)


def bad_blocks() -> None:
    bmt.init_distributed()
    block = bmt.Block(old.OldLinear(4, 4))
    with pytest.raises(ConfigError, match="already in the list"):
        bmt.TransformerBlockList([block, block])
    with pytest.raises(AssertionError, match="Pass the module inside it"):
        bmt.Block(block)
    forgotten = old.OldLinear(4, 4)
    forgotten.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="not distributed: scale"):
        bmt.Block(forgotten)
    with pytest.raises(ConfigError, match="num_hidden=1"):
        bmt.TransformerBlockList([Returns()])(torch.ones(4), torch.ones(4))
    with pytest.raises(ConfigError, match="read-only"):
        bmt.config["rank"] = 3
    with pytest.raises(KeyError, match="local_size"):
        bmt.config["locl_size"]


def test_bad_blocks_are_refused() -> None:
    run_distributed(bad_blocks, 1)


def a_block_of_the_wrong_mode(stages: int) -> None:
    bmt.init_distributed(pipe_size=stages)
    with pytest.raises(AssertionError, match="PIPE"):
        bmt.PipelineTransformerBlockList([bmt.Block(old.OldLinear(4, 4)) for _ in range(2)])


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_wants_its_own_blocks(stages: int) -> None:
    run_distributed(a_block_of_the_wrong_mode, stages, stages)


def test_nothing_works_before_init_distributed() -> None:
    assert not dist.is_initialized()
    calls = [
        lambda: bmt.DistributedParameter(torch.ones(2)),
        lambda: bmt.Block(nn.Linear(2, 2)),
        lambda: bmt.init_parameters(nn.Linear(2, 2)),
        lambda: bmt.optim.OptimManager(),
        lambda: bmt.config["topology"],
        lambda: bmt.save(nn.Linear(2, 2), "x"),
        lambda: bmt.synchronize(),
    ]
    for call in calls:
        with pytest.raises(DistributedError, match="init_distributed"):
            call()
    assert bmt.config["initialized"] is False
