"""Weights that become zeros and stay so, in one process; layouts in `test_zeros_layouts.py`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import gpt2, hf_bert, hf_gpt2, llama, logits, mixtral, texts
from torch import Tensor, nn

from bmforge.compress.matrices import find_matrices
from bmforge.compress.prune import PruneConfig, Sparsifier, keep_zeros, prune
from bmforge.compress.prune.calibrated import prune_sparsegpt
from bmforge.compress.prune.masks import cubic_share
from bmforge.compress.prune.select import mask_matrix
from bmforge.compress.statistics import Hessian
from bmforge.errors import ConfigError
from bmforge.models.pack import quantize_
from bmforge.surgery import wrappers_of
from bmforge.testing import assert_close
from bmforge.train.optim.muon import Muon

MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "hf gpt2": hf_gpt2, "hf bert": hf_bert}


def shares(model: nn.Module) -> list[float]:
    return [float((m.read() == 0).double().mean()) for m in find_matrices(model)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


def train(
    model: nn.Module, optimizer: Any, steps: int, sparsifier: Sparsifier | None = None
) -> None:
    model.train()
    for step, ids in enumerate(texts(steps, seed=7), 1):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if sparsifier is not None:
            sparsifier.after_step_(model, step)
    model.eval()


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_half_of_each_matrix(build: Callable[[], nn.Module]) -> None:
    """The smallest half of every matrix of the blocks; nothing else changes."""
    plain = build()
    model = copy.deepcopy(plain)
    prune(model)
    assert set(shares(model)) == {0.5}
    for before, after in zip(find_matrices(plain), find_matrices(model), strict=True):
        gone = after.read() == 0
        assert before.read()[gone].abs().max() <= before.read()[~gone].abs().min()
        assert torch.equal(before.read()[~gone], after.read()[~gone])
    changed = {id(m.parameter) for m in find_matrices(model)}
    others = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) not in changed:
            assert torch.equal(parameter, others[name]), name
    assert torch.isfinite(logits(model, texts()[0])).all()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (gpt2, adamw),
        (gpt2, muon),
        pytest.param(gpt2, sgd, marks=LONG),
        pytest.param(hf_gpt2, adamw, marks=LONG),
        pytest.param(hf_gpt2, sgd, marks=LONG),
        pytest.param(hf_gpt2, muon, marks=LONG),
    ],
)
def test_zeros_stay_zeros(build: Callable[[], nn.Module], optimizer: Any) -> None:
    model = build()
    sparsifier = prune(model, PruneConfig(pattern="2:4"))
    before = [m.read().clone() for m in find_matrices(model)]
    train(model, optimizer(model.parameters()), 50)  # nobody puts them back
    for old, matrix in zip(before, find_matrices(model), strict=True):
        assert torch.equal(old == 0, matrix.read() == 0)
        assert not torch.equal(old, matrix.read())
    facts = sparsifier.finish_(model)
    assert facts["share"] == 0.5
    assert all(not wrappers_of(module) for module in model.modules())


def test_the_gradient_is_the_masked_one() -> None:
    """What is not zero has the plain gradient, in one pass and where activations are made again."""
    plain = gpt2().double()
    prune(plain).finish_(plain)
    model = copy.deepcopy(plain)
    sparsifier = Sparsifier(PruneConfig())
    sparsifier.attach_(model)
    ids = texts()[0]
    for one in (plain, model):
        one(input_ids=ids, labels=ids).loss.backward()
    masked = {id(m.parameter) for m in find_matrices(model)}
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        want = a.grad * (a != 0) if id(b) in masked else a.grad
        assert torch.equal(b.grad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_zero_has_no_gradient_whatever_comes(dtype: torch.dtype) -> None:
    """Neither does an infinite one get through, and those of small and large weights stay."""
    weight = torch.tensor([0.0, -0.0, 1e-30, -3.0, 0.0, 2.0], dtype=dtype, requires_grad=True)
    grad = torch.tensor([5.0, torch.inf, -2.0, 7.0, torch.nan, -torch.inf], dtype=dtype)
    keep_zeros(weight).backward(grad)
    assert torch.equal(weight.grad, torch.tensor([0, 0, -2.0, 7.0, 0, -torch.inf], dtype=dtype))


@pytest.mark.parametrize(
    ("method", "scope"),
    [
        ("magnitude", "layer"),
        ("movement", "global"),
        pytest.param("magnitude", "row", marks=LONG),
        pytest.param("magnitude", "global", marks=LONG),
        pytest.param("movement", "layer", marks=LONG),
        pytest.param("movement", "row", marks=LONG),
    ],
)
def test_a_schedule(method: Any, scope: Any) -> None:
    """Zeros come as the cubic rule says, and momentum does not bring them back."""
    model = gpt2()
    config = PruneConfig(
        method=method, scope=scope, sparsity=0.6, begin_step=4, steps=12, every_steps=3
    )
    sparsifier = prune(model, config)
    assert set(shares(model)) == {0.0}
    optimizer = adamw(model.parameters())
    weights = sum(m.read().numel() for m in find_matrices(model))
    model.train()
    gone: list[Tensor] = []
    for step, ids in enumerate(texts(20, seed=7), 1):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsifier.after_step_(model, step)
        now = [m.read() == 0 for m in find_matrices(model)]
        last = min(16, step - (step - 4) % 3) if step >= 4 else 0
        want = cubic_share(last, 4, 12, 0.6)
        assert sum(int(z.sum()) for z in now) / weights == pytest.approx(want, abs=0.02)
        assert all(bool(new[old].all()) for old, new in zip(gone, now, strict=False))
        gone = now
    assert sparsifier.state_dict() == {"share": pytest.approx(0.6)}


def test_global_takes_the_smallest_of_all() -> None:
    model = gpt2()
    flat = torch.cat([m.read().flatten() for m in find_matrices(model)])
    prune(model, PruneConfig(scope="global", sparsity=0.3))
    found = torch.cat([m.read().flatten() for m in find_matrices(model)])
    zeros = round(0.3 * flat.numel())
    assert int((found == 0).sum()) == zeros
    assert torch.equal(found == 0, flat.abs() <= flat.abs().sort().values[zeros - 1])


def test_global_with_ties_is_exact() -> None:
    model = gpt2()
    with torch.no_grad():
        for matrix in find_matrices(model):
            matrix.write_(matrix.read().bfloat16().float().mul(8).round())
    already = sum(int((m.read() == 0).sum()) for m in find_matrices(model))
    total = sum(m.read().numel() for m in find_matrices(model))
    share = (already + total) / total / 2
    prune(model, PruneConfig(scope="global", sparsity=share))
    assert sum(int((m.read() == 0).sum()) for m in find_matrices(model)) == round(share * total)


def test_movement_takes_what_moves_to_zero() -> None:
    """One weight grows, one shrinks, as many as are told: those that shrank go."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    config = PruneConfig(method="movement", where=("*",), steps=4, every_steps=4)
    sparsifier = prune(model, config)
    with torch.no_grad():
        for step in range(1, 5):
            for layer in model:
                layer.weight[:2] *= 1.1
                layer.weight[2:] *= 0.9
            sparsifier.after_step_(model, step)
    for layer in model:
        assert (layer.weight[2:] == 0).all()
        assert (layer.weight[:2] != 0).all()


def test_resumed_zeros_are_the_mask() -> None:
    """A run that is loaded into fresh objects holds the zeros it finds, whatever momentum says."""
    model = gpt2()
    config = PruneConfig(sparsity=0.5, steps=4, every_steps=2)
    sparsifier = prune(model, config)
    optimizer = adamw(model.parameters())
    train(model, optimizer, 4, sparsifier)
    fresh = gpt2()
    again = prune(fresh, config)
    fresh.load_state_dict(model.state_dict())
    other = adamw(fresh.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(sparsifier.state_dict())
    train(model, optimizer, 5, sparsifier)
    train(fresh, other, 5, again)
    assert set(shares(fresh)) == {0.5}
    assert_close(dict(fresh.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def plain_wanda(weight: Tensor, x: Tensor, by_row: bool) -> Tensor:
    score = weight.abs() * x.double().pow(2).sum(0).sqrt()
    flat = score if by_row else score.reshape(1, -1)
    gone = torch.zeros_like(flat, dtype=torch.bool)
    for row in range(flat.shape[0]):
        gone[row, flat[row].argsort()[: flat.shape[1] // 2]] = True
    return weight.masked_fill(gone.view(weight.shape), 0)


class Step(nn.Module):
    """A block with two layers that get the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.left(x)) * self.right(x)


class Steps(nn.Module):
    def __init__(self, layers: int = 3, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Step(width) for _ in range(layers)).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inputs(count: int = 3, rows: int = 40, width: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.1, 3, width, dtype=torch.float64)
    made = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(count)
    )
    return [{"x": x * scale} for x in made]


@pytest.mark.parametrize("scope", ["layer", "row"])
def test_wanda_block_by_block(scope: Any) -> None:
    """Every block against a plain score, of what the pruned blocks before it make."""
    plain, model = Steps(), Steps()
    prune(model, PruneConfig(method="wanda", scope=scope), batches=inputs())
    hidden = torch.cat([batch["x"] for batch in inputs()])
    for old, new in zip(plain.blocks, model.blocks, strict=True):
        for name in ("left", "right"):
            want = plain_wanda(getattr(old, name).weight.detach(), hidden, scope == "row")
            assert torch.equal(getattr(new, name).weight, want)
        with torch.no_grad():
            hidden = new(hidden)


@pytest.mark.parametrize("structured", [False, True])
def test_wanda_against_torchao(structured: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.sparsity import WandaSparsifier

        theirs = Steps(1).float()
        ours = copy.deepcopy(theirs)
        sparsifier = WandaSparsifier(0.5, 4 if structured else None)
        names = ("blocks.0.left", "blocks.0.right")
        sparsifier.prepare(theirs, [{"tensor_fqn": f"{name}.weight"} for name in names])
        batches = [{"x": batch["x"].float()} for batch in inputs()]
        for batch in batches:
            theirs(**batch)
        sparsifier.step()
        sparsifier.squash_mask()
    # Theirs keeps squared norms, so it looks at |w| x^2: give ours what makes that of it.
    pattern = "2:4" if structured else "free"
    squares = sum(batch["x"].square().sum(0) for batch in batches)
    for name in names:
        weight = ours.get_submodule(name).weight.detach()
        score = weight.abs() * squares
        mask = mask_matrix(score, PruneConfig(pattern=pattern), 0.5)
        assert torch.equal(theirs.get_submodule(name).weight, weight.masked_fill(~mask, 0))


def plain_sparsegpt(weight: Tensor, x: Tensor, config: PruneConfig) -> Tensor:
    """Column by column, every later column brought up to date at once; the inverse is inverted."""
    rows, columns = weight.shape
    hessian = x.t() @ x / x.shape[0]
    hessian += config.damp * hessian.diagonal().mean() * torch.eye(columns, dtype=x.dtype)
    left = weight.clone()
    gone = torch.zeros(rows, columns, dtype=torch.bool)
    for column in range(columns):
        inverse = torch.linalg.inv(hessian[column:, column:])
        if column % (4 if config.pattern == "2:4" else config.block_columns) == 0:
            step = 4 if config.pattern == "2:4" else config.block_columns
            last = min(column + step, columns)
            costs = [torch.linalg.inv(hessian[j:, j:])[0, 0] for j in range(column, last)]
            score = left[:, column:last] ** 2 / torch.stack(costs)
            if config.pattern == "2:4":
                order = score.argsort(dim=1, stable=True)[:, :2]
                gone[:, column:last].scatter_(1, order, True)
            else:
                order = score.flatten().argsort(stable=True)[: round(score.numel() / 2)]
                gone[:, column:last] = (
                    torch.zeros(score.numel(), dtype=torch.bool)
                    .index_fill(0, order, True)
                    .view(score.shape)
                )
        settled = left[:, column].masked_fill(gone[:, column], 0)
        error = (left[:, column] - settled) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
        left[:, column] = settled
    return left


@pytest.mark.parametrize("pattern", ["free", "2:4"])
def test_sparsegpt_against_a_plain_one(pattern: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(12, 40, generator=generator, dtype=torch.float64)
    mix = torch.randn(40, 40, generator=generator, dtype=torch.float64)
    x = torch.randn(300, 40, generator=generator, dtype=torch.float64) @ mix
    config = PruneConfig(method="sparsegpt", pattern=pattern, block_columns=16)
    found = Hessian()
    for part in x.split(100):
        found.add(part)
    got = prune_sparsegpt(weight, found, config, "it")
    want = plain_sparsegpt(weight, x, config)
    assert torch.equal(got == 0, want == 0)
    assert_close(got, want, rtol=1e-5, atol=1e-8)
    dropped = weight.masked_fill(got == 0, 0)

    def error(one: Tensor) -> float:
        return float((x @ (one - weight).t()).square().sum())

    assert error(got) < 0.8 * error(dropped)


@pytest.mark.parametrize(
    "build", [mixtral, hf_gpt2, pytest.param(gpt2, marks=LONG), pytest.param(hf_bert, marks=LONG)]
)
def test_texts_help(build: Callable[[], nn.Module]) -> None:
    """SparseGPT is nearer to the plain model than the smallest weights' way is, on any model."""
    batches, plain = texts(8), build()
    off = {}
    for method in ("magnitude", "sparsegpt"):
        model = build()
        config = PruneConfig(method=method)  # type: ignore[arg-type]
        prune(model, config, batches=batches if config.is_calibrated else None)
        assert sum(shares(model)) / len(shares(model)) == pytest.approx(0.5, abs=0.01)
        off[method] = float((logits(model, batches[0]) - logits(plain, batches[0])).norm())
    assert off["sparsegpt"] < off["magnitude"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sparsity": 1.0}, "must be above 0 and below 1"),
        ({"method": "wand"}, "Did you mean 'wanda'"),
        ({"pattern": "2:4", "sparsity": 0.7}, "half of the weights"),
        ({"pattern": "2:4", "scope": "row"}, "scope='row' has no effect"),
        ({"pattern": "2:4", "steps": 5}, "is applied at once"),
        ({"method": "wanda", "steps": 5}, "uses calibration data once"),
        ({"method": "wanda", "scope": "global"}, "comparable within one matrix"),
        ({"method": "movement"}, "set `steps`"),
        ({"damp": 0.1}, "damp=0.1 has no effect"),
        ({"every_steps": 3}, "without steps"),
        ({"method": "sparsegpt", "pattern": "2:4-both"}, "not supported by sparsegpt"),
    ],
)
def test_settings_that_contradict_each_other(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PruneConfig(**fields)


def test_what_cannot_be_pruned() -> None:
    with pytest.raises(ConfigError, match=r"matches nothing.*Did you mean"):
        prune(gpt2(), PruneConfig(where=("layers.*.attn.q_prj",)))
    with pytest.raises(ConfigError, match="matches no linear layer"):
        prune(gpt2(), PruneConfig(where=("**.attn_norm",)))
    with pytest.raises(ConfigError, match="already quantized"):
        prune(quantize_(gpt2(), "int8"))
    odd = llama(intermediate_size=42)
    with pytest.raises(ConfigError, match=r"multiples of 4, unlike those of .*down_proj"):
        prune(odd, PruneConfig(pattern="2:4"))
    assert all((m.read() != 0).all() for m in find_matrices(odd))
    with pytest.raises(ConfigError, match="calibration data has no batches"):
        prune(gpt2(), PruneConfig(method="wanda"))
    with pytest.raises(ConfigError, match="calibration batch 1 is empty"):
        prune(gpt2(), PruneConfig(method="wanda"), batches=[texts()[0], texts()[0][:0]])
    with pytest.raises(ConfigError, match="have no effect with method='magnitude'"):
        prune(gpt2(), batches=texts())
    with pytest.raises(ConfigError, match="not in a repeated block"):
        prune(gpt2(), PruneConfig(method="wanda", where=("embed",)), batches=texts())
    with pytest.raises(ConfigError, match=r"Hessian .* is not positive .*increase damp"):
        prune_sparsegpt(torch.ones(4, 8), zeros_seen(), PruneConfig(method="sparsegpt"), "it")


def zeros_seen() -> Hessian:
    found = Hessian()
    found.add(torch.zeros(20, 8))
    return found


@pytest.mark.parametrize("scope", ["global", "layer", "row"])
@pytest.mark.parametrize(("build", "is_tied"), [(gpt2, True), (llama, False)])
def test_embedding_and_head_count_once(build: Callable[[], Any], is_tied: bool, scope: Any) -> None:
    """A tied matrix is one; the zeros that are said are there, as many as were asked for."""
    model, share = build(), 0.3
    config = PruneConfig(where=("embed", "lm_head"), scope=scope, sparsity=share)
    facts = prune(model, config).finish_(model)
    matrices = [model.embed.weight] if is_tied else [model.embed.weight, model.lm_head.weight]
    assert (model.embed.weight is model.lm_head.weight) == is_tied
    count = sum(matrix.numel() for matrix in matrices)
    want = {
        "global": round(share * count),
        "layer": sum(round(share * matrix.numel()) for matrix in matrices),
        "row": sum(round(share * m.shape[1]) * m.shape[0] for m in matrices),
    }
    assert (facts["zeros"], facts["weights"]) == (want[scope], count)
    assert sum(int((matrix == 0).sum()) for matrix in matrices) == want[scope]


def test_globs_name_what_becomes_zeros() -> None:
    model = gpt2()
    prune(model, PruneConfig(where=("layers.0", "embed")))
    named = {n for n, p in model.named_parameters() if bool((p == 0).double().mean() > 0.4)}
    weights = {n for n in named if n.endswith(".weight")}
    assert weights == {
        "embed.weight",
        *(f"layers.0.attn.{k}_proj.weight" for k in "qkvo"),
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
    }
