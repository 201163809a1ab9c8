"""The peaks of GPUs by the names that drivers report, against the makers' data sheets."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from bmforge import device
from bmforge.gpu_specs import DEVICES, find_devices_by_name, peak_flops_by_name
from bmforge.parallel.planner.hardware import find_device

# Dense TFLOP/s of bf16 or fp16 products with fp32 accumulation.
DATA_SHEETS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H800": 989,
    "NVIDIA H20": 148,
    "NVIDIA B200": 2250,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "Tesla T4": 65,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 5080": 112.6,
    "NVIDIA GeForce RTX 5070 Ti": 87.9,
    "NVIDIA GeForce RTX 5070": 61.7,
    "NVIDIA GeForce RTX 2080 Ti": 53.8,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI210": 181,
    "AMD Instinct MI250X": 191.5,
}
UNKNOWN = (
    "NVIDIA GeForce RTX 4080 Laptop GPU",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "Quadro RTX 5000 with Max-Q Design",
    "NVIDIA GH200 480GB",
    "NVIDIA T400",
    "NVIDIA L400",
)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_peaks_are_those_of_the_data_sheets(name: str) -> None:
    with mock.patch.object(device, "device_name", return_value=name):
        run = device.peak_flops(torch.device("meta"))
    assert run == pytest.approx(DATA_SHEETS[name] * 1e12, rel=5e-3)
    plans = {find_device(one.name).peak_flops("bf16") for one in find_devices_by_name(name)}
    assert plans == {run}


def test_every_row_is_found_by_some_name() -> None:
    names = (*DATA_SHEETS, "NVIDIA GeForce RTX 4090 Laptop GPU")
    found = {one.name for name in names for one in find_devices_by_name(name)}
    assert found == set(DEVICES)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_variants_have_no_peak(name: str) -> None:
    assert peak_flops_by_name(name) is None


@pytest.mark.parametrize(
    ("name", "multiprocessors", "whole"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14 / 108, 312),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42 / 108, 312),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16 / 132, 989),
        ("NVIDIA H100 80GB HBM3 MIG 4g.40gb", 64 / 132, 989),
    ],
)
def test_a_mig_instance_has_its_share(name: str, multiprocessors: float, whole: float) -> None:
    assert peak_flops_by_name(name) == pytest.approx(whole * 1e12 * multiprocessors)


def test_a_laptop_4090_is_half_a_4090() -> None:
    laptop = peak_flops_by_name("NVIDIA GeForce RTX 4090 Laptop GPU")
    assert laptop == pytest.approx(0.5 * 165.2e12, rel=0.1)
