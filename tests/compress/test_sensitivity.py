"""How much matrices harm when they are rounded, and where a budget of bits goes."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import gpt2, hf_bert, llama, logits, mixtral, texts

from bmforge.compress.matrices import find_matrices
from bmforge.compress.quantize import QuantizeConfig, quantize
from bmforge.compress.rounding import round_matrix
from bmforge.compress.sensitivity import Sensitivity, allocate_bits, measure_sensitivity
from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.nn.packing import PRESETS
from bmforge.testing import assert_equal_trees


def test_the_loss_of_one_matrix_alone() -> None:
    """Against rounding that matrix in a copy; the model itself is as it was."""
    model = gpt2()
    batches = [{"input_ids": ids, "labels": ids} for ids in texts(2)]
    before = copy.deepcopy(model)
    found = measure_sensitivity(model, batches, schemes=("int4",))
    assert_equal_trees(dict(model.named_parameters()), dict(before.named_parameters()))
    assert len(found) == 12
    for one in found[::5]:
        other: Any = copy.deepcopy(before)
        weight = other.get_submodule(one.name).weight
        with torch.no_grad():
            weight.copy_(round_matrix(weight, PRESETS["int4"]))
            grown = sum(float(other(**b).loss - before(**b).loss) for b in batches) / 2
        assert one.loss == pytest.approx(grown, abs=1e-6)
        assert one.weights == weight.numel()
        assert one.bits == 4.5


@pytest.mark.parametrize("build", [llama, mixtral, hf_bert])
def test_without_labels_outputs_are_compared(build: Any) -> None:
    found = measure_sensitivity(build(), texts(2))
    assert len(found) == 2 * len({m.owner for m in find_matrices(build())})
    by_name = itertools.groupby(found, key=lambda one: one.name)
    for _, each in by_name:
        four, eight = each
        assert (four.scheme, eight.scheme) == ("int4", "int8")
        assert 0 <= eight.loss < four.loss


def brute_force(found: list[Sensitivity], average: float) -> float:
    """The least loss of all ways to choose."""
    groups = [list(each) for _, each in itertools.groupby(found, key=lambda one: one.name)]
    weights, best = sum(each[0].weights for each in groups), float("inf")
    for chosen in itertools.product(*groups):
        if sum(one.bits * one.weights for one in chosen) <= average * weights + 1e-9:
            best = min(best, sum(one.loss for one in chosen))
    return best


@pytest.mark.parametrize("average", [4.5, 5.5, 6.5, 8.5])
def test_a_budget_is_spent_where_it_helps(average: float) -> None:
    """Equal matrices: the greedy choice is the best of all."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, harm in enumerate(torch.rand(8, generator=generator).tolist()):
        found.append(Sensitivity(str(number), "int4", harm, 64, 4.5))
        found.append(Sensitivity(str(number), "int8", harm / 10, 64, 8.5))
    chosen = allocate_bits(found, average)
    by = {(one.name, one.scheme): one for one in found}
    got = [by[name, scheme] for name, scheme in chosen.items()]
    assert sum(one.bits for one in got) / 8 <= average
    assert sum(one.loss for one in got) == pytest.approx(brute_force(found, average))


def test_auto_is_between_four_and_eight_bits(tmp_path: Path) -> None:
    batches, plain = texts(2), llama()
    off = {}
    for scheme, bits in (("int4", None), ("auto", 6.5), ("int8", None)):
        model: Any = llama()
        config = QuantizeConfig(scheme=scheme, average_bits=bits)
        quantize(model, config, batches=batches if bits else None)
        off[scheme] = float((logits(model, batches[0]) - logits(plain, batches[0])).norm())
        if bits:
            model.save_pretrained(tmp_path)
            again = AutoModel.from_pretrained(tmp_path)
            assert torch.equal(logits(again, batches[0]), logits(model, batches[0]))
            assert {change.options["bits"] for change in model.config.changes} == {4, 8}
    assert off["int8"] < off["auto"] < off["int4"]


def test_budgets_out_of_reach() -> None:
    with pytest.raises(ConfigError, match=r"at least 4\.500"):
        quantize(llama(), QuantizeConfig(scheme="auto", average_bits=4.0), batches=texts(1))
    with pytest.raises(ConfigError, match=r"layers can use \(allowed: at most 8\.500\)"):
        quantize(llama(), QuantizeConfig(scheme="auto", average_bits=9.0), batches=texts(1))
    with pytest.raises(ConfigError, match="unknown scheme"):
        measure_sensitivity(llama(), texts(1), schemes=("int3",))
