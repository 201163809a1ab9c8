"""What is asked of the host: freed memory is kept, products stay fp32, a word switches it off."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from bmforge import device, host_memory, host_tuning
from bmforge.errors import ConfigError
from bmforge.host_tuning import MemoryWatch, keep_freed_memory, read_tuning, tune_host

CPU = torch.device("cpu")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Logged messages."""
    said: list[str] = []

    class Log:
        def info(self, text: str, *values: object, extra: Mapping[str, bool] | None = None) -> None:
            said.append(text % values)
            if text.startswith("settings of the CPU"):
                assert extra == {"file_only": True}

        def warning(self, text: str, *values: object) -> None:
            said.append(text % values)

    monkeypatch.setattr(host_tuning, "get_logger", Log)
    return said


def set_words(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("BMFORGE_HOST_TUNING", words)


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BMFORGE_HOST_TUNING")
    assert read_tuning() == {"memory", "products"}
    for given, words in [
        ("none", set()),
        ("", set()),
        ("products, memory", {"memory", "products"}),
    ]:
        set_words(monkeypatch, given)
        assert read_tuning() == words
    for given, hint in [
        ("memry", "Did you mean 'memory'"),
        ("none,memory", "none, or a comma-separated list of"),
    ]:
        set_words(monkeypatch, given)
        with pytest.raises(ConfigError, match=hint):
            read_tuning()


@pytest.mark.skipif(host_memory.find_glibc() is None, reason="the allocator is not glibc's")
def test_freed_memory_is_not_faulted_in_again() -> None:
    assert keep_freed_memory()
    pages, faults = (32 << 20) // 4096, []
    # Aligned blocks need room around them, so the first rounds still take more from the system.
    for _ in range(24):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(32 << 20, dtype=torch.uint8).fill_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert sum(faults[-8:]) < pages


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_memory, host_tuning):
        monkeypatch.setattr(module, "find_glibc", lambda: None)
    set_words(monkeypatch, "memory")
    assert not keep_freed_memory()
    host_memory.trim_memory()
    with tune_host(CPU) as watch:
        assert watch is None


def test_what_grows_is_given_back_and_said(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    sizes: Iterator[int] = iter([400, 480, 440, 590, 610, 500, 610, 760, 770, 500])
    given: list[int] = []
    monkeypatch.setattr(host_tuning, "resident_bytes", lambda: next(sizes) * 10**7)
    monkeypatch.setattr(host_tuning, "trim_memory", lambda: given.append(1))
    watch = MemoryWatch()
    for _ in range(8):  # two more sizes are read where it is said what is left
        watch.note_step()
    assert len(given) == len(messages) == 2
    assert "used 6.10 GB before" in messages[0]
    assert "uses 5.00 GB now" in messages[0]


@pytest.mark.parametrize("is_slow", [True, False])
def test_products_stay_fp32_and_the_setting_goes_back(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(device, "_mkl_is_slow", lambda: is_slow)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    left, right = torch.randn(96, 512), torch.randn(512, 160)
    with device.fast_products() as faster:
        assert faster == (matmul.fp32_precision == "bf16")
        assert is_slow or not faster
        product = left @ right
    assert matmul.fp32_precision == before
    # A chain of 512 sums errs by some hundred roundings at worst; bf16 would by 2^-9 of a term.
    bound = (left.abs() @ right.abs()) * 2e-6
    assert ((product.double() - left.double() @ right.double()).abs() <= bound).all()


def test_a_cpu_that_rounds_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(device, "_keeps_fp32", lambda: False)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with device.fast_products() as faster:
        assert not faster
        assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_the_look_sees_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device._keeps_fp32()
    full = torch.full
    rounded = lambda *given: full(*given).bfloat16().float()  # noqa: E731
    monkeypatch.setattr(torch, "full", rounded)
    assert not device._keeps_fp32()


def test_whose_cpu_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for vendor, slow in [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)]:
        monkeypatch.setattr(device, "processor_field", lambda name, vendor=vendor: vendor)
        assert device._mkl_is_slow() == slow
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(device, "processor_field", lambda name: "AuthenticAMD")
    assert not device._mkl_is_slow()


def test_it_is_said_how_to_switch_it_off(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr(device, "_mkl_is_slow", lambda: True)
    set_words(monkeypatch, "products")
    with tune_host(CPU) as watch:
        assert watch is None
        was_fast = torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    assert len(messages) == was_fast
    assert all("BMFORGE_HOST_TUNING=none" in message for message in messages)
    set_words(monkeypatch, "none")
    with tune_host(CPU) as watch:
        assert watch is None
    # The meta device is no host, so nothing is measured.
    with tune_host(torch.device("meta")) as watch:
        assert watch is None
    assert len(messages) == was_fast


def set_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, idle_ticks: tuple[int, int]) -> None:
    """Make two cores idle for the given ticks of the 100 ticks of the next sample."""
    stat = tmp_path / "stat"

    def write(idle: tuple[int, int]) -> None:
        lines = [f"cpu{n} {100 - i} 0 0 {i} 0 0 0 0 0 0" for n, i in enumerate(idle)]
        stat.write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, "intr 1"]) + "\n")

    stat.write_text("cpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(host_tuning, "_STAT", stat)
    monkeypatch.setattr(host_tuning.time, "sleep", lambda seconds: write(idle_ticks))
    monkeypatch.setattr(host_tuning.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(host_tuning.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_a_busy_machine_is_reported_with_the_command(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], tmp_path: Path
) -> None:
    set_load(monkeypatch, tmp_path, (90, 0))
    host_tuning.warn_if_busy()
    (message,) = messages
    assert message.startswith("other processes use 1.1 CPU cores, so the 2 threads")
    assert "`OMP_NUM_THREADS=1 bmforge ...`" in message
    set_words(monkeypatch, "none")
    set_load(monkeypatch, tmp_path, (90, 0))
    with tune_host(CPU):
        assert len(messages) == 2
    set_load(monkeypatch, tmp_path, (90, 0))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    host_tuning.warn_if_busy()
    assert len(messages) == 2


def test_an_idle_machine_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], tmp_path: Path
) -> None:
    set_load(monkeypatch, tmp_path, (95, 90))
    host_tuning.warn_if_busy()
    monkeypatch.setattr(host_tuning, "_STAT", tmp_path / "missing")
    host_tuning.warn_if_busy()
    assert not messages


_RETURNS = """
import torch
from bmforge.host_memory import resident_bytes
from bmforge.host_tuning import return_freed_memory

def grown() -> int:
    before, kept = resident_bytes(), []
    for size in range(4, 24):  # blocks that live long between blocks that do not
        passing = torch.ones(size << 20, dtype=torch.uint8)
        kept.append(torch.ones(2 << 20, dtype=torch.uint8))
        del passing
    return (resident_bytes() - before - (40 << 20)) >> 20

assert return_freed_memory()
print(grown())
"""


@pytest.mark.skipif(host_memory.find_glibc() is None, reason="the allocator is not glibc's")
def test_freed_blocks_are_returned() -> None:
    """In a process of its own, whose allocator no other test has told anything."""
    done = subprocess.run([sys.executable, "-c", _RETURNS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 4
