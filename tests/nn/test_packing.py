"""Packed matrices: the values of GGUF's own quantisation, and widths that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.nn.packing import (
    PRESETS,
    QuantSpec,
    find_preset,
    pack_matrix,
    pack_values,
    packed_shapes,
    pick_rows,
    quantize_groups,
    unpack_matrix,
    unpack_values,
)
from bmforge.nn.products import pack_groups

SPECS = {
    **PRESETS,
    "int4 rows": QuantSpec(4, 0),
    "int4 minima": QuantSpec(4, 32, symmetric=False),
    "int8 minima": QuantSpec(8, 64, symmetric=False, scale_dtype="float32"),
    "int8 narrow": QuantSpec(8, 16, scale_dtype="float32"),
}


def draw(rows: int, columns: int) -> torch.Tensor:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    matrix[1] = 0
    return matrix


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_the_values_of_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    spec = {
        "Q8_0": PRESETS["int8"],
        "Q4_0": PRESETS["int4"],
        "Q4_1": QuantSpec(4, 32, symmetric=False),
    }[kind]
    matrix = draw(37, 96)
    number = getattr(gguf.GGMLQuantizationType, kind)
    want = gguf.quants.dequantize(gguf.quants.quantize(matrix.numpy(), number), number)
    packed = pack_matrix(quantize_groups(matrix, spec), spec)
    assert np.array_equal(unpack_matrix(packed, 37, spec).numpy(), want)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packing_and_back(spec: QuantSpec, rows: int) -> None:
    matrix = draw(max(rows, 2), 256)[:rows]
    integers = quantize_groups(matrix, spec)
    packed = pack_matrix(integers, spec)
    found = {key: tuple(t.shape) for key, t in packed._asdict().items() if t is not None}
    assert found == packed_shapes(rows, 256, spec)
    assert torch.equal(unpack_values(packed.packed, spec)[:rows], integers.values)
    assert torch.equal(pack_values(integers.values, spec), packed.packed)
    group = spec.group_of(256)
    want = integers.values.view(rows, -1, group) * integers.scales.float()[..., None]
    if integers.minima is not None:
        want = want + integers.minima.float()[..., None]
    dense = unpack_matrix(packed, rows, spec)
    assert torch.equal(dense, want.view(rows, 256))
    index = torch.tensor([[rows - 1, 0], [0, rows // 2]])
    assert torch.equal(pick_rows(packed, index, spec), dense[index])


@pytest.mark.parametrize("layout", ["contiguous", "gaps", "transposed"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packing_groups_that_are_apart_in_memory(spec: QuantSpec, rows: int, layout: str) -> None:
    integers = quantize_groups(draw(max(rows, 2), 256)[:rows], spec)
    groups = integers.values.view(rows, -1, spec.group_of(256))
    if layout == "gaps":
        groups = torch.nn.functional.pad(groups, (2, 1), value=77)[..., 2:-1]
    elif layout == "transposed":
        groups = groups.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    minima = None if integers.minima is None else integers.minima.float()
    packed = pack_groups(groups, integers.scales.float(), minima, spec)
    for part, expected in zip(packed, pack_matrix(integers, spec), strict=True):
        assert (part is None and expected is None) or torch.equal(part, expected)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_error_is_at_most_half_a_step(spec: QuantSpec) -> None:
    """But for the last value of 4 bits, which one side of zero lacks: a whole one."""
    matrix = draw(37, 256)
    integers = quantize_groups(matrix, spec)
    dense = unpack_matrix(pack_matrix(integers, spec), 37, spec)
    error = (dense - matrix).view(37, -1, spec.group_of(256)).abs().amax(-1)
    steps = 1.0 if spec.bits == 4 and spec.symmetric else 0.5
    rounding = 1e-3 * matrix.abs().max() if spec.scale_dtype == "float16" else 1e-5
    assert (error <= steps * integers.scales.float().abs() * 1.001 + rounding).all()


def test_where_the_bytes_lie() -> None:
    """Panel 1, block 2, row 3 of it: columns 8 to 11; 16 to 19 and 20 to 23 in halves."""
    values = torch.zeros(32, 64, dtype=torch.int8)
    values[19, 8:12] = torch.tensor([1, -2, 3, -4], dtype=torch.int8)
    packed = pack_values(values, PRESETS["int8"])
    assert packed[1, 2, 12:16].view(torch.int8).tolist() == [1, -2, 3, -4]
    assert packed.count_nonzero() == 4
    values[19] = 0
    values[19, 16:24] = torch.arange(-4, 4, dtype=torch.int8)
    block = pack_values(values, PRESETS["int4"])[1, 2, 12:16].tolist()
    assert [byte & 15 for byte in block] == [4, 5, 6, 7]
    assert [byte >> 4 for byte in block] == [8, 9, 10, 11]


def test_widths_that_do_not_fit() -> None:
    assert "(nearest: 96 or 128)" in PRESETS["int4"].problem(100)
    assert "size is supported by 'int8-dynamic'" in PRESETS["int4"].problem(100)
    assert "(nearest: 128)" in PRESETS["int4-128"].problem(96)
    assert "too long for one scale" in PRESETS["int8-dynamic"].problem(1 << 18)
    assert PRESETS["int4"].problem(96) == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 5}, "bits=5 must be 8 or 4"),
        (
            {"bits": 4, "group_size": 16},
            "group_size=16 is not supported with bits=4",
        ),
        ({"group_size": -16}, "group_size=-16"),
        ({"activations": "int4"}, "activations='int4'"),
        ({"outlier_ratio": 1.0}, "outlier_ratio=1.0"),
        ({"scale_dtype": "bfloat16"}, "scale_dtype='bfloat16'"),
    ],
)
def test_schemes_that_there_are_not(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QuantSpec(**fields)


def test_a_scheme_by_its_name() -> None:
    assert find_preset("int4") is PRESETS["int4"]
    assert find_preset(QuantSpec(4, 64)).group_size == 64
    with pytest.raises(ConfigError, match="Did you mean 'int4-128'"):
        find_preset("int4-129")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_that_no_scale_holds(value: float, symmetric: bool) -> None:
    matrix = draw(4, 64)
    matrix[2, 40] = value
    with pytest.raises(ConfigError, match="not finite or are too large"):
        quantize_groups(matrix, QuantSpec(8, 32, symmetric))
