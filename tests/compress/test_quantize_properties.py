"""Quantization keeps zeros, dead channels and dtypes: properties of every method and scheme."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import gpt2, hf_bert, hf_gpt2, llama, logits, mixtral, texts
from torch import Tensor

from bmforge.compress import (
    CompressConfig,
    MoEfyConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
    compress,
)
from bmforge.compress.prune import prune
from bmforge.compress.quantize import quantize
from bmforge.compress.quantize.scaling import quantize_clipped
from bmforge.models import OPT, T5, OPTConfig, T5Config
from bmforge.nn.packing import (
    Integers,
    QuantSpec,
    pack_matrix,
    packed_shapes,
    quantize_groups,
    unpack_matrix,
)
from bmforge.nn.products import dequantize
from bmforge.nn.quantized import PackedStore
from bmforge.surgery import persistent_tensors

MODELS: dict[str, Any] = {
    **{"llama": llama, "gpt2": gpt2, "mixtral": mixtral},
    **{"hf gpt2": hf_gpt2, "hf bert": hf_bert},
}
METHODS = ("absmax", "smooth", "awq", "gptq")
SPECS = {
    "int8": QuantSpec(8, 32),
    "int4": QuantSpec(4, 32),
    "rows": QuantSpec(8, 0, scale_dtype="float32"),
    "int4 zero point": QuantSpec(4, 32, symmetric=False, scale_dtype="float32"),
    "int8 zero point": QuantSpec(8, 32, symmetric=False, scale_dtype="float32"),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(quick: set[tuple[str, ...]], *axes: Any) -> list[Any]:
    return [
        pytest.param(
            *one, id="-".join(map(str, one)), marks=() if one in quick else pytest.mark.long
        )
        for one in itertools.product(*axes)
    ]


def stores(model: Any) -> list[PackedStore]:
    return [module for module in model.modules() if isinstance(module, PackedStore)]


def dense(store: Any) -> list[Tensor]:
    """The floats of a packed layer's matrices, by their rows."""
    if hasattr(store, "stack_sizes"):
        return [m for key in store.stack_sizes() for m in store.dense(key, torch.float32)]
    return [store.dense(torch.float32)]


QUICK_ZEROS = {
    ("llama", "gptq", "int4"),
    ("llama", "gptq", "int4 zero point"),
    ("mixtral", "gptq", "rows"),
    ("llama", "awq", "int4 zero point"),
    ("hf gpt2", "smooth", "int8 zero point"),
}


@pytest.mark.parametrize(("build", "method", "spec"), cases(QUICK_ZEROS, MODELS, METHODS, SPECS))
def test_pruned_groups_stay_pruned(build: str, method: str, spec: str) -> None:
    """2:4 zeros and integers in one recipe: every group of four still has two zeros."""
    config = CompressConfig(
        prune=PruneConfig(pattern="2:4"),
        quantize=QuantizeConfig(spec=SPECS[spec], method=method),  # type: ignore[arg-type]
    )
    batches = None if method == "absmax" else texts(8)
    job = compress(MODELS[build](), config, batches=batches)
    report = job.finish_()
    packed = stores(job.model)
    assert packed
    assert report.phases[0].facts["zeros"]["groups_2_of_4"] == 1
    for matrix in (m for store in packed for m in dense(store)):
        zeros = (matrix.unflatten(-1, (-1, 4)) == 0).sum(-1)
        assert int(zeros.min()) >= 2


def test_t5_by_all_four_methods() -> None:
    """Narrower, experts, zeros and integers of an encoder-decoder, from one set of batches."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 128, "num_layers": 2}
    model = T5.from_config(T5Config(**sizes, num_heads=4, head_dim=8)).eval()
    batches = [{"input_ids": ids, "labels": ids[:, :9]} for ids in texts(8)]
    config = CompressConfig(
        structure=StructureConfig(intermediate_size=64, by="taylor"),
        moefy=MoEfyConfig(num_experts=2, share=0.5),
        prune=PruneConfig(pattern="2:4", method="wanda"),
        quantize=QuantizeConfig(scheme="int8", method="gptq"),
    )
    job = compress(model, config, batches=batches)
    facts = job.finish_().phases[0].facts
    assert facts["zeros"]["groups_2_of_4"] == 1
    assert set(facts) == {"structure", "experts", "zeros", "quantize"}
    loss = job.model(**batches[0]).loss
    assert bool(loss.isfinite())
    assert len(stores(job.model)) > 2 * 6


QUICK_DTYPES = {
    ("llama", "awq", torch.bfloat16),
    ("llama", "smooth", torch.float16),
    ("hf bert", "smooth", torch.bfloat16),
    ("gpt2", "awq", torch.float16),
}


@pytest.mark.parametrize(
    ("build", "method", "dtype"), cases(QUICK_DTYPES, MODELS, ("smooth", "awq"), DTYPES[1:])
)
def test_16_bit_models_are_scaled_as_fp32_ones(
    build: str, method: str, dtype: torch.dtype, caplog: Any
) -> None:
    """Layers are scaled too, and the model is as near to the plain one as the fp32 model is.

    A layer with and without scales may have nearly equal errors, whose order depends on the dtype.
    """
    batches, plain = texts(8), MODELS[build]()
    want, errors, counts = logits(plain, batches[0]), [], []
    for one in (torch.float32, dtype):
        caplog.clear()
        model = quantize(copy.deepcopy(plain).to(one), "int4", method=method, batches=batches)
        errors.append(float((logits(model, batches[0]).float() - want).norm() / want.norm()))
        (record,) = (r for r in caplog.records if "scaled the inputs" in r.getMessage())
        counts.append(record.args[1])
    assert (counts[0] > 0) == (counts[1] > 0)
    assert counts[0] > 0 or build == "hf bert"
    assert errors[1] < 1.2 * errors[0] + 0.02


def test_a_method_that_does_nothing_warns(caplog: Any) -> None:
    """BERT's norms feed the residual as well: of a model of these alone nothing is scaled."""
    model = hf_bert()
    where = ("bert.encoder.layer.*.attention.self.query",)
    config = QuantizeConfig(scheme="int4", method="smooth", where=where)
    quantize(model, config, batches=texts(4))
    (record,) = (r for r in caplog.records if "scaled the inputs" in r.getMessage())
    assert record.levelname == "WARNING"
    assert "0 of 2 layers" in record.getMessage()


def opt_with_dead_features(seed: int, share: float) -> tuple[OPT, list[Tensor], Tensor]:
    """An OPT, calibration texts that leave some ReLU features off, and texts that switch them on.

    Tokens below and above 48 lie on the two sides of a direction of the hidden states.
    """
    model = OPT.from_config(
        OPTConfig(
            **{"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
            **{"intermediate_size": 128, "max_seq_len": 64, "init_std": 0.2},
        )
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(64, generator=generator)
    direction /= direction.norm()
    with torch.no_grad():
        model.embed.weight[48:] += share * direction
        model.embed.weight[:48] -= share * direction
    batches = [torch.randint(0, 48, (8, 32), generator=generator) for _ in range(8)]
    return model, batches, torch.randint(48, 96, (4, 24), generator=generator)


@pytest.mark.parametrize("method", ["smooth", "awq", "gptq"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_dead_features_survive(method: str, seed: int) -> None:
    """Texts that use what calibration did not cost about what plain rounding costs."""
    model, batches, others = opt_with_dead_features(seed, 6.0)
    want, errors = logits(model, others), {}
    for name in ("absmax", method):
        given = {} if name == "absmax" else {"batches": batches}
        small = quantize(copy.deepcopy(model), "int8-dynamic", method=name, **given)
        errors[name] = float((logits(small, others) - want).norm() / want.norm())
        assert all(
            bool(t.isfinite().all())
            for t in persistent_tensors(small).values()
            if t.is_floating_point()
        )
    assert errors[method] < 3 * errors["absmax"]  # 30 to 40 where dead channels are scaled


def kill_inputs(model: OPT, layer: str) -> OPT:
    with torch.no_grad():
        up = model.layers[layer].mlp.up_proj
        up.weight.zero_()
        up.bias.fill_(-1)
    return model


@pytest.mark.parametrize("method", ["gptq", "awq", "smooth"])
@pytest.mark.parametrize("damp", [0.01, 1.0])
def test_a_layer_without_inputs_is_rounded(method: str, damp: float, caplog: Any) -> None:
    if method != "gptq" and damp == 1.0:
        return
    model = kill_inputs(opt_with_dead_features(0, 0.0)[0], "1")
    plain = model.layers["1"].mlp.down_proj.weight.detach().clone()
    config = QuantizeConfig(scheme="int4", method=method, damp=damp)  # type: ignore[arg-type]
    quantize(model, config, batches=[torch.randint(0, 96, (8, 32)) for _ in range(8)])
    store: Any = model.layers["1"].mlp.down_proj
    spec = QuantSpec(4, 32)
    want = unpack_matrix(pack_matrix(quantize_groups(plain, spec), spec), 64, spec)
    assert torch.equal(store.dense(torch.float32), want)
    if method == "gptq":
        assert any("inputs of 1 matrices" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_layer_without_inputs_is_pruned_by_magnitude(method: str, caplog: Any) -> None:
    model = kill_inputs(opt_with_dead_features(0, 0.0)[0], "1")
    twin = copy.deepcopy(model)
    batches = [torch.randint(0, 96, (8, 32)) for _ in range(8)]
    prune(model, PruneConfig(method=method, pattern="2:4"), batches=batches).finish_(model)  # type: ignore[arg-type]
    prune(twin, PruneConfig(pattern="2:4")).finish_(twin)
    assert torch.equal(
        model.layers["1"].mlp.down_proj.weight, twin.layers["1"].mlp.down_proj.weight
    )
    assert any("inputs of 1 matrices" in record.getMessage() for record in caplog.records)


matrices = st.tuples(
    st.integers(1, 40), st.sampled_from((32, 64, 96)), st.floats(-2, 2), st.integers(0, 1 << 16)
)


@settings(max_examples=30, deadline=None)
@given(matrices, st.sampled_from((4, 8)), st.sampled_from((0, 32)), st.floats(0.6, 1.2))
def test_zero_points(size: Any, bits: int, group: int, ratio: float) -> None:
    """Integer zero points: minima are multiples of scales, 0 stays 0, steps are half at most."""
    rows, columns, mean, seed = size
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + mean
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = 0
    spec = QuantSpec(bits, group, symmetric=False, scale_dtype="float32")
    found = quantize_groups(weight, spec, ratio)
    assert found.minima is not None
    zeros = -found.minima / found.scales.where(found.scales > 0, torch.tensor(1.0))
    assert torch.equal(zeros, zeros.round())
    packed = pack_matrix(found, spec)
    assert {n: tuple(t.shape) for n, t in packed._asdict().items()} == packed_shapes(
        rows, columns, spec
    )
    for floats in (unpack_matrix(packed, rows, spec), dequantize(packed, rows, spec)):
        assert bool((floats[weight == 0] == 0).all())
        if ratio >= 1:
            step = found.scales.repeat_interleave(columns // found.scales.shape[1], 1)
            # The ends of the range lose up to another half step to the rounded zero point.
            assert bool(((floats - weight).abs() <= 1.01 * step).all())


@settings(max_examples=15, deadline=None)
@given(matrices, st.sampled_from(("int4", "int4 zero point", "int8")))
def test_clipping_never_raises_the_error(size: Any, name: str) -> None:
    """Against every single ratio that could be taken for the whole matrix, group by group."""
    rows, columns, _, seed = size
    generator = torch.Generator().manual_seed(seed)
    weight, spec = torch.randn(rows, columns, generator=generator), SPECS[name]
    x = torch.randn(100, columns, generator=generator) * torch.rand(columns, generator=generator)

    def errors(integers: Integers) -> Tensor:
        floats = unpack_matrix(pack_matrix(integers, spec), rows, spec).double()
        off = (floats - weight.double()).unflatten(1, (-1, 32))
        parts = x.double().unflatten(1, (-1, 32))
        damp = 0.01 * parts.square().sum(0).mean()  # of all columns, as in GPTQ
        return torch.einsum("tgi,rgi->trg", parts, off).square().sum(0) + damp * off.square().sum(
            -1
        )

    best = errors(quantize_clipped(weight, spec, x))
    for ratio in (1.0, 0.9, 0.8, 1.14):
        assert bool(
            (best <= errors(quantize_groups(weight, spec, ratio)) * (1 + 1e-3) + 1e-6).all()
        )
