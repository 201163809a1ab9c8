"""The error that the search for scales minimizes is that of the folded, packed block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import gpt2, hf_gpt2, llama, texts

from bmforge.compress.calibrate import calibrate_blocks
from bmforge.compress.quantize.block_error import block_errors
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.fold import find_folds, fold_
from bmforge.compress.quantize.replace_layers import store_block_
from bmforge.compress.quantize.scaling import awq_scales, smooth_scales
from bmforge.compress.statistics import InputSizes
from bmforge.nn.packing import PRESETS, QuantSpec

MODELS: dict[str, Any] = {"llama": llama, "gpt2": gpt2, "hf gpt2": hf_gpt2}
SPECS = {
    "int4": PRESETS["int4"],
    "int4 float": QuantSpec(4, 32, activations="float"),
    "rows": PRESETS["int8-dynamic"],
    "int4 zero point": QuantSpec(4, 32, symmetric=False, scale_dtype="float32"),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_error_is_that_of_the_packed_block(build: Any, spec: QuantSpec) -> None:
    """Every fold of the first block, really folded and packed, has the error that was measured."""
    model, batches, pairs = build(), texts(2), []

    def visit(run: Any) -> None:
        if pairs:
            return
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        specs = {matrix.owner: spec for matrix in run.matrices}
        want = list(run.run())
        for number in range(len(find_folds(run))):
            packed = copy.deepcopy(model)
            run.block = packed.get_submodule(run.name)
            run.matrices = [
                type(m)(m.owner, packed.get_submodule(m.owner), m.key, m.index)
                for m in run.matrices
            ]
            fold = find_folds(run)[number]
            generator = torch.Generator().manual_seed(number)
            columns = fold.targets[0].read().shape[1]
            scales = fold.settle(torch.rand(columns, generator=generator) + 0.5)
            (measured,) = block_errors(run, fold, specs, [scales])
            if not fold_(run, fold, scales):
                continue
            store_block_(packed, fold.targets, specs)
            outputs = list(run.run())
            real = sum(float((o - w).square().sum()) for o, w in zip(outputs, want, strict=True))
            pairs.append((measured, real))
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    calibrate_blocks(model, batches, visit, lambda _: InputSizes())
    assert len(pairs) > 1
    for measured, real in pairs:
        assert measured == pytest.approx(real, rel=2e-2)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_scales_never_raise_the_error_of_the_block(build: Any) -> None:
    """AWQ's scales have at most the error of plain rounding; block after block."""
    batches, model, spec, tried = texts(4), build(), PRESETS["int4"], []

    def visit(run: Any) -> None:
        specs = {matrix.owner: spec for matrix in run.matrices}
        for fold in find_folds(run):
            inputs = run.statistics[fold.targets[0].name]
            grid = QuantizeConfig().grid
            scales = awq_scales(run, fold, inputs, specs, grid)
            smooth = fold.settle(smooth_scales(fold, inputs, 0.5))
            plain = torch.ones_like(scales)
            errors = block_errors(run, fold, specs, [plain, scales, smooth])
            assert errors[1] <= errors[0]
            tried.append(errors[1] < errors[0])

    calibrate_blocks(model, batches, visit, lambda _: InputSizes())
    assert any(tried)
