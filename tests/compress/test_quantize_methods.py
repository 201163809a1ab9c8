"""Quantising after training: GPTQ against a plain one, scales that change nothing, any model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import gpt2, hf_bert, hf_gpt2, llama, logits, mixtral, texts
from torch import Tensor, nn

from bmforge.compress.calibrate import calibrate_blocks
from bmforge.compress.columns import update_columns
from bmforge.compress.matrices import find_matrices, watch_inputs
from bmforge.compress.prune import prune
from bmforge.compress.quantize import QuantizeConfig, quantize
from bmforge.compress.quantize.fold import find_folds, fold_
from bmforge.compress.quantize.gptq import round_gptq
from bmforge.compress.quantize.replace_layers import store_block_
from bmforge.compress.rounding import round_matrix
from bmforge.compress.statistics import Hessian, InputSizes
from bmforge.errors import ConfigError
from bmforge.models import T5, AutoModel, T5Config
from bmforge.nn.packing import PRESETS, QuantSpec, pack_matrix, quantize_groups, unpack_matrix
from bmforge.nn.quantized import PackedStore, QuantizedExperts
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees

LONG = pytest.mark.long
MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "hf gpt2": hf_gpt2, "hf bert": hf_bert}
SPECS = {
    "int8": PRESETS["int8"],
    "int4": PRESETS["int4"],
    "rows": PRESETS["int8-dynamic"],
    "minima": QuantSpec(4, 32, symmetric=False, scale_dtype="float32"),
    "minima8": QuantSpec(8, 32, symmetric=False, scale_dtype="float32"),
}


def problem(rows: int = 10, columns: int = 64) -> tuple[Tensor, Tensor]:
    """A matrix and inputs whose columns have much in common."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return weight, torch.randn(400, columns, generator=generator, dtype=torch.float64) @ mix


def gather(x: Tensor) -> Hessian:
    found = Hessian()
    for part in x.split(130):
        found.add(part)
    return found


def plain_gptq(weight: Tensor, x: Tensor, spec: QuantSpec, damp: float) -> Tensor:
    """Column by column, all later columns brought up to date at once, inverses inverted."""
    columns = weight.shape[1]
    hessian = x.t() @ x / x.shape[0]
    hessian += damp * hessian.diagonal().mean() * torch.eye(columns, dtype=x.dtype)
    left, group = weight.clone(), spec.group_of(columns)
    most = {
        (8, True): (-127, 127),
        (4, True): (-8, 7),
        (4, False): (0, 15),
        (8, False): (-128, 127),
    }
    low, high = most.get((spec.bits, spec.symmetric), (-128, 127))
    for column in range(columns):
        if column % group == 0:
            part = left[:, column : column + group]
            found = quantize_groups(
                part, QuantSpec(spec.bits, 0, spec.symmetric, scale_dtype=spec.scale_dtype)
            )
            scale = found.scales[:, 0].double()
            least = 0.0 if found.minima is None else found.minima[:, 0].double()
        settled = ((left[:, column] - least) / scale).round().clamp(low, high) * scale + least
        inverse = torch.linalg.inv(hessian[column:, column:])
        error = (left[:, column] - settled) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
        left[:, column] = settled
    return left


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gptq_against_a_plain_one(spec: QuantSpec, block: int) -> None:
    weight, x = problem()
    found = round_gptq(weight, gather(x), spec, block_columns=block)
    got = unpack_matrix(pack_matrix(found, spec), weight.shape[0], spec)
    want = plain_gptq(weight, x, spec, 0.01)
    assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    rounded = round_matrix(weight, spec)

    def error(one: Tensor) -> float:
        return float((x @ (one.double() - weight).t()).square().sum())

    assert error(got) < 0.7 * error(rounded)


def test_the_cost_of_columns_is_lagranges() -> None:
    """One column settled: the change of all others is what minimises the error, in closed form."""
    weight, x = problem(3, 8)

    class First:
        def update(self, number: int, block: Tensor, place: int, diagonal: Tensor) -> Tensor:
            return torch.zeros(3, dtype=block.dtype) if number == 0 else block[:, place]

    got = update_columns(weight, gather(x), First(), damp=1e-9, block_columns=4, name="it")
    want = torch.linalg.lstsq(x[:, 1:], x @ weight.t()).solution.t()
    assert_close(got, torch.cat((torch.zeros(3, 1, dtype=x.dtype), want), 1), rtol=1e-5, atol=1e-6)


QUICK = {("llama", "smooth"), ("mixtral", "gptq"), ("hf gpt2", "awq"), ("hf bert", "gptq")}


@pytest.mark.parametrize(
    ("build", "method"),
    [
        pytest.param(
            build, method, id=f"{name}-{method}", marks=() if (name, method) in QUICK else LONG
        )
        for name, build in MODELS.items()
        for method in ("absmax", "smooth", "awq", "gptq")
    ],
)
def test_any_model(build: Callable[[], Any], method: str) -> None:
    """Linear layers of blocks are packed, nothing else, and the model says nearly the same."""
    batches, plain, model = texts(8), build(), build()
    spec = QuantSpec(8, 32, activations="float")
    quantize(model, spec, method=method, batches=None if method == "absmax" else batches)
    packed = {n for n, m in model.named_modules() if isinstance(m, PackedStore)}
    assert packed == {m.owner for m in find_matrices(plain)}
    assert not any(
        part in n for n in packed for part in ("embed", "wte", "head", "router", "gate.")
    )
    want = logits(plain, batches[0])
    assert (logits(model, batches[0]) - want).norm() < 0.03 * want.norm()
    with pytest.raises(ConfigError, match="already quantized"):
        quantize(model, spec)


@pytest.mark.parametrize("build", [llama, mixtral])
def test_gptq_is_nearer(build: Callable[[], Any]) -> None:
    batches, plain = texts(8, rows=8), build()
    spec, off = QuantSpec(4, 32, activations="float"), {}
    for method in ("absmax", "gptq"):
        model = quantize(
            build(), spec, method=method, batches=batches if method == "gptq" else None
        )
        off[method] = float((logits(model, batches[0]) - logits(plain, batches[0])).norm())
    assert off["gptq"] < off["absmax"]


def test_awq_is_nearer_where_inputs_differ() -> None:
    """A few loud channels, as trained models have them."""
    batches = texts(8, rows=8)
    spec, off = QuantSpec(4, 32, activations="float"), {}

    def build() -> Any:
        model = llama()
        with torch.no_grad():
            for layer in model.layers.values():
                layer.attn_norm.weight[::9] *= 20
                layer.mlp_norm.weight[::7] *= 20
        return model

    for method in ("absmax", "awq"):
        given = None if method == "absmax" else batches
        model = quantize(build(), spec, method=method, batches=given)
        off[method] = float((logits(model, batches[0]) - logits(build(), batches[0])).norm())
    assert off["awq"] < off["absmax"]


@pytest.mark.parametrize("method", ["smooth", "awq", "gptq"])
def test_saved_and_opened(method: str, tmp_path: Path) -> None:
    model = quantize(llama(), "int4", method=method, batches=texts(8))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config == model.config
    assert_equal_trees(persistent_tensors(again), persistent_tensors(model))
    assert torch.equal(logits(again, texts()[0]), logits(model, texts()[0]))
    assert {change.kind for change in again.config.changes} == {"quantize"}
    (change,) = again.config.changes
    assert "layers.*.attn.q_proj" in change.where


@pytest.mark.parametrize(("build", "kinds"), [(llama, 4), (gpt2, 3), (hf_gpt2, 2), (hf_bert, 1)])
def test_scales_go_through(build: Callable[[], Any], kinds: int) -> None:
    """Where a scale may go through, the model is the same after it; elsewhere it is taken back."""
    model, batches = build(), texts(2)
    want = logits(model, batches[0])
    went = []

    def visit(run: Any) -> None:
        for fold in find_folds(run):
            generator = torch.Generator().manual_seed(len(went))
            columns = fold.targets[0].read().shape[1]
            before = [t.clone() for t in fold.tensors()]
            scales = fold.settle(torch.rand(columns, generator=generator) + 0.5)
            went.append(fold_(run, fold, scales))
            same = all(torch.equal(a, b) for a, b in zip(before, fold.tensors(), strict=True))
            assert same != went[-1]

    calibrate_blocks(model, batches, visit, lambda _: InputSizes())
    assert sum(went) == 2 * kinds or build is hf_bert
    assert any(went) or build is hf_bert
    assert_close(logits(model, batches[0]), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [None, Hessian.size_bytes], ids=["whole", "in parts"])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_blocks_see_what_the_whole_model_gives_them(build: Callable[[], Any], size: Any) -> None:
    """With nothing changed, what is gathered is what comes to each matrix in plain forwards."""
    model, batches = build().double(), texts(3)
    matrices, found = find_matrices(model), {}

    def note(matrix: Any, x: Tensor) -> None:
        found.setdefault(matrix.name, Hessian()).add(x.reshape(-1, x.shape[-1]))

    with torch.no_grad(), watch_inputs(matrices, note):
        for ids in batches:
            model(input_ids=ids)
    seen: dict[str, Hessian] = {}
    calibrate_blocks(
        model, batches, lambda run: seen.update(run.statistics), lambda _: Hessian(), size=size
    )
    assert set(seen) == set(found)
    for name, one in found.items():
        assert seen[name].tokens == one.tokens
        assert_close(seen[name].products, one.products)


def test_blocks_see_the_quantised_ones_before() -> None:
    """The inputs of the last block are those that the quantised model has there."""
    model, batches = llama(), texts(3)
    seen: dict[str, Tensor] = {}

    def visit(run: Any) -> None:
        seen[run.name] = run.inputs[0].clone()
        for matrix in run.matrices:
            matrix.write_(round_matrix(matrix.read(), PRESETS["int4"]))

    calibrate_blocks(model, batches, visit, lambda _: Hessian())
    with torch.no_grad():
        states = model(input_ids=batches[0], output_hidden_states=True).hidden_states
    assert_close(seen["layers.1"], states[1])


@pytest.mark.parametrize("build", [llama, mixtral])
def test_what_is_spoilt_in_one_part_does_not_show_in_the_next(build: Callable[[], Any]) -> None:
    """A block's parts come last first, so all see the plain block, and fit together in memory."""
    model, plain, batches = build().double(), build().double(), texts(3)
    inputs: list[Tensor] = []
    seen: dict[str, Hessian] = {}
    ends: list[bool] = []

    def visit(run: Any) -> None:
        if run.name == "layers.1":
            return
        inputs[:] = run.inputs
        sizes = {id(one): one.products.nbytes for one in run.statistics.values()}
        matrices = find_matrices(plain, ["layers.0"])
        whole = sum(matrix.read().nbytes for matrix in matrices)
        assert sum(sizes.values()) <= max(whole // 2, *sizes.values())
        seen.update(run.statistics)
        ends.append(run.is_last)
        for matrix in run.matrices:
            matrix.write_(torch.full_like(matrix.read(), 7.0))

    calibrate_blocks(model, batches, visit, lambda _: Hessian(), size=Hessian.size_bytes)
    assert ends == [False] * (len(ends) - 1) + [True]
    assert len(ends) > 1
    found: dict[str, Hessian] = {}

    def note(matrix: Any, x: Tensor) -> None:
        found.setdefault(matrix.name, Hessian()).add(x.reshape(-1, x.shape[-1]))

    with torch.no_grad(), watch_inputs(find_matrices(plain, ["layers.0"]), note):
        for ids in batches:
            plain(input_ids=ids)
    assert set(seen) == set(found)
    for name, one in found.items():
        assert_close(seen[name].products, one.products)


def test_quantised_blocks_are_not_kept_plain() -> None:
    """The model becomes smaller as it goes: nobody holds the layers that integers replaced."""
    model = llama()
    first = [m for n, m in model.layers["0"].named_modules() if isinstance(m, torch.nn.Linear)]
    alive = [weakref.ref(module) for module in first]
    del first
    seen: list[int] = []

    def visit(run: Any) -> None:
        if run.name == "layers.1":
            seen.append(sum(one() is not None for one in alive))
        store_block_(model, run.matrices, {m.owner: PRESETS["int4"] for m in run.matrices})

    calibrate_blocks(model, texts(3), visit, lambda _: Hessian(), size=Hessian.size_bytes)
    assert alive
    assert set(seen) == {0}


def test_pruned_then_quantised_keeps_its_zeros() -> None:
    model = llama()
    prune(model).finish_(model)
    zeros = {m.name: m.read() == 0 for m in find_matrices(model)}
    quantize(model, "int8")
    for name, gone in zeros.items():
        assert (model.get_submodule(name).dense(torch.float32)[gone] == 0).all()  # type: ignore[operator]


def test_experts_have_a_hessian_each() -> None:
    plain, model = mixtral(), mixtral()
    spec = QuantSpec(4, 32, activations="float")
    quantize(model, spec, method="gptq", batches=texts(16, rows=8))
    store: Any = model.get_submodule("layers.0.mlp.experts")
    assert isinstance(store, QuantizedExperts)
    dense = store.dense("up_proj", torch.float32)
    stack: Any = plain.get_submodule("layers.0.mlp.experts")
    for expert in range(3):
        rounded = round_matrix(stack.up_proj[expert].detach(), spec)
        assert not torch.equal(dense[expert], rounded)
        near = (dense[expert] - stack.up_proj[expert]).norm()
        assert near < 2 * (rounded - stack.up_proj[expert]).norm()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheme": "int9"}, "unknown quantization scheme"),
        ({"method": "gtpq"}, "Did you mean 'gptq'"),
        ({"scheme": "auto"}, "needs average_bits"),
        ({"average_bits": 5.0}, 'no effect without scheme="auto"'),
        ({"damp": 0.5}, "no effect with method='absmax'"),
        ({"method": "awq", "training": "fake"}, "leave method out"),
        ({"training": "int8"}, "int8-dynamic"),
        ({"method": "smooth", "strength": 1.5}, "must be from 0 to 1"),
        ({"spec": QuantSpec(), "scheme": "int4"}, "no effect together with spec"),
        ({"spec": QuantSpec(outlier_ratio=0.1), "method": "gptq"}, "not support outlier columns"),
    ],
)
def test_settings_that_contradict_each_other(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QuantizeConfig(**fields)


def test_what_cannot_be_quantised() -> None:
    with pytest.raises(ConfigError, match="calibration data has no batches"):
        quantize(llama(), "int4", method="gptq")
    with pytest.raises(ConfigError, match="have no effect with method='absmax'"):
        quantize(llama(), "int4", batches=texts())
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match="as many calibration tokens as columns"):
        quantize(model, "int4", method="gptq", batches=[texts()[0][:1, :8]])
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    both = T5.from_config(T5Config(**sizes, num_layers=2, head_dim=16), seed=0)
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=r"received 8 tokens.*quantized up to encoder.layers.1"):
        quantize(both, "int4", method="gptq", batches=[{"input_ids": ids, "labels": ids[:, :2]}])
    odd = llama(intermediate_size=40)
    with pytest.raises(ConfigError, match=r"down_proj: the input size 40 is not a multiple of 32"):
        quantize(odd, "int4")
    assert not any(isinstance(m, PackedStore) for m in odd.modules())
    with pytest.raises(ConfigError, match="no repeated blocks"):
        quantize(nn.Linear(32, 32), "int8")
    with pytest.raises(ConfigError, match="set both in the config and as an argument"):
        quantize(llama(), QuantizeConfig(method="awq"), method="gptq", batches=texts())


class Odd(nn.Module):
    """Blocks that are not given what the one before made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[1](x)


def test_blocks_that_are_no_chain() -> None:
    with pytest.raises(ConfigError, match="cannot be calibrated"):
        quantize(Odd(), "int8", method="gptq", batches=[{"x": torch.randn(64, 32)}])
    model = copy.deepcopy(Odd())
    assert isinstance(quantize(model, "int8").blocks[0], PackedStore)  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1000, 5000])
def test_sampled_rows_are_of_all_rows(count: int) -> None:
    """At most 512, evenly from the first ones to the last ones, also over batches."""
    sizes = InputSizes()
    rows = torch.arange(2.0 * count)[:, None]
    for part in rows.split(count):
        sizes.add(part)
    found = sizes.sample()[:, 0]
    assert len(found) <= 512
    assert len(found) >= min(2 * count, 250)
    gaps = found.diff()
    assert (gaps > 0).all()
    assert found[0] == 0
    assert 2 * count - found[-1] <= 2 * gaps.median()
