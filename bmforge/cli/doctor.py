"""`bmforge doctor`: shows versions, kernels, threads, memory, extras, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bmforge import __version__
from bmforge.cli.options import DoctorCommand
from bmforge.device import default_device, device_memory_bytes, device_name
from bmforge.errors import install_command
from bmforge.host_memory import available_host_bytes, host_memory_bytes
from bmforge.host_tuning import read_tuning, recommend_threads

__all__ = ["Finding", "find_extras", "run_doctor"]

_PACKAGES = ("numpy", "safetensors", "tokenizers", "huggingface-hub", "transformers", "peft")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*extra\s*==\s*['\"]([\w-]+)['\"]")
# Extras for development, and the extra that includes all others; they are not listed.
_NOT_LISTED = ("dev", "test", "all")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        name: checked item.
        value: result of the check.
        advice: command that installs the item if it is missing; otherwise empty.
    """

    name: str
    value: str
    advice: str = ""


def run_doctor(command: DoctorCommand) -> None:
    """Print the state of this installation and everything that is missing."""
    findings = [*_find_versions(), *_find_machine(), *find_extras()]
    if command.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")
        if finding.advice:
            print(f"{'':<{width}}  -> {finding.advice}")


def _find_versions() -> Iterator[Finding]:
    yield Finding("bmforge", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("torch", torch.__version__)
    for name in _PACKAGES:
        yield Finding(name, _version_of(name) or "not installed")


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_machine() -> Iterator[Finding]:
    device = default_device()
    memory = device_memory_bytes(device)
    room = "" if memory is None else f", {memory / 2**30:.1f} GiB"
    yield Finding("device", f"{device_name(device)}{room}")
    free, total = available_host_bytes(), host_memory_bytes()
    available = "unknown" if free is None else f"{free / 2**30:.1f} GiB"
    yield Finding("memory", f"{available} available of {total / 2**30:.1f} GiB")
    threads, cores, advice = torch.get_num_threads(), _count_cores(), ""
    if threads > cores:
        advice = (
            "matrix products are slower with more threads than cores: run export "
            f"OMP_NUM_THREADS={cores}"
        )
    fewer, busy = recommend_threads(threads)
    if not advice and fewer < threads:
        advice = (
            f"other processes use {busy:.1f} cores, and threads that wait for each other are slow: "
            f"run export OMP_NUM_THREADS={fewer}"
        )
    yield Finding("threads", f"{threads} of {cores} cores", advice)
    yield Finding("CPU settings", ", ".join(sorted(read_tuning())) or "none")
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    yield Finding(
        "C++ compiler",
        compiler or "none: PyTorch's slower kernels are used",
        "" if compiler else "install g++ or clang++",
    )


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_extras() -> Iterator[Finding]:
    """Yield a finding for each of bmforge's optional extras, with the packages that are missing."""
    try:
        requirements = importlib.metadata.requires("bmforge") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "extras", "unknown: bmforge is not installed as a package", install_command("all")
        )
        return
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        match: Any = _REQUIREMENT.match(requirement)
        if match and match[1].lower() != "bmforge" and match[2] not in _NOT_LISTED:
            extras.setdefault(match[2], []).append(match[1])
    for extra, packages in sorted(extras.items()):
        missing = [name for name in dict.fromkeys(packages) if _version_of(name) is None]
        value = f"missing: {', '.join(missing)}" if missing else "complete"
        advice = install_command(extra) if missing else ""
        yield Finding(f"extra {extra}", value, advice)
