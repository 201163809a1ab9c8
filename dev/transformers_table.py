#!/usr/bin/env python3
"""Write docs/reference/capabilities_transformers.md: the capabilities of each model type.

    python dev/transformers_table.py measure rows.jsonl [TYPE ...]
    python dev/transformers_table.py write rows.jsonl

`measure` checks small random models of the named causal language models (all types of the installed
transformers without names) against plain transformers, and appends a line per type. Checks that the
file has a result of are skipped, so the work can be divided. `write` makes the page from the lines.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto import modeling_auto

from bmforge.errors import ConfigError, DistributedError
from bmforge.infer import generate
from bmforge.models import AutoModel
from bmforge.models.pack import quantize_
from bmforge.models.transformers.small_copy import build_twin
from bmforge.nn.packed_store import PackedStore
from bmforge.parallel import Layout
from bmforge.testing.foreign_layouts import compare_layout, compare_stages
from bmforge.tune.delta import Lora

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "capabilities_transformers.md"
TYPES = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_SECONDS, _NEW = 240, 6
_LEAST_PACKED = 0.95


class Sample:
    """A small model of one type, plain and opened by bmforge."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self.directory = kind, directory
        self.plain = build_twin(transformers.AutoConfig.for_model(kind), "language_model")
        self.plain.save_pretrained(directory / "plain")

    def open(self) -> Any:
        """Open the model by the backend."""
        return AutoModel.from_pretrained(self.directory / "plain", backend="transformers")


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    """Return random token ids."""
    return torch.randint(5, 150, (rows, count), generator=torch.Generator().manual_seed(seed))


def check_weights(sample: Sample) -> str:
    """Logits and saved files are bit for bit those of transformers."""
    ours, ids = sample.open(), tokens(2, 20)
    with torch.no_grad():
        if not torch.equal(ours(ids).logits, sample.plain(input_ids=ids).logits):
            return "no: logits differ"
    ours.save_pretrained(sample.directory / "ours")
    before = load_file(sample.directory / "plain" / "model.safetensors")
    after = load_file(sample.directory / "ours" / "model.safetensors")
    same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    return "yes" if same else "no: saved tensors differ"


def check_loss(sample: Sample) -> str:
    """Loss with a given number of items and all gradients are those of plain cross-entropy."""
    ours, ids = sample.open(), tokens(2, 17, seed=1)
    labels = ids.clone()
    labels[0, :6] = -100
    sample.plain.zero_grad()
    logits = sample.plain(input_ids=ids).logits[:, :-1].flatten(0, 1)
    wanted = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / 50
    wanted.backward()
    loss = ours(ids, labels=labels, num_items_in_batch=50.0).loss
    loss.backward()
    if not torch.allclose(loss, wanted, rtol=1e-5):
        return f"no: loss {float(loss):.5f}, not {float(wanted):.5f}"
    plain = dict(sample.plain.named_parameters())
    for name, parameter in ours.named_parameters():
        zero = torch.zeros_like(parameter)
        got = zero if parameter.grad is None else parameter.grad
        need = zero if plain[name].grad is None else plain[name].grad
        if not torch.allclose(got, need, rtol=1e-3, atol=2e-5 * max(1e-2, float(need.abs().max()))):
            return f"no: gradient of {name}"
    return "yes"


def check_packing(sample: Sample) -> str:
    """A packed row has the logits of its documents alone, or is refused."""
    ours = sample.open()
    first, second = tokens(1, 9, seed=2), tokens(1, 13, seed=3)
    with torch.no_grad():
        alone = torch.cat([sample.plain(input_ids=ids).logits for ids in (first, second)], 1)
        documents = torch.tensor([[0] * 9 + [1] * 13])
        packed = ours(torch.cat((first, second), 1), document_ids=documents).logits
    return "yes" if torch.allclose(packed, alone, atol=1e-3) else "no: documents see each other"


def check_generation(sample: Sample) -> str:
    """Rows of two lengths in a batch continue as each alone, computed without a cache."""
    ours, ids = sample.open(), tokens(2, 8, seed=4)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    plain = {"eos_token_id": (), "forced_eos_token_id": None}
    got = generate(ours, ids, mask, max_new_tokens=_NEW, **plain)
    for row, own, left in zip(ids, got, (mask == 0).sum(1).tolist(), strict=True):
        alone = row[None, left:]
        with torch.no_grad():
            for _ in range(_NEW):
                chosen = sample.plain(input_ids=alone).logits[:, -1].argmax(-1, keepdim=True)
                alone = torch.cat((alone, chosen), 1)
        if not torch.equal(own[left:], alone[0]):
            return "no: tokens differ"
    return "yes"


def check_lora(targets: list[str]) -> Callable[[Sample], str]:
    """Return the check that an adapter's parameters all get gradients."""

    def check(sample: Sample) -> str:
        ours, ids = sample.open(), tokens(2, 12, seed=5)
        Lora(ours, targets=targets, rank=2)
        ours(ids, labels=ids).loss.backward()
        trained = [(n, p) for n, p in ours.named_parameters() if p.requires_grad]
        idle = [name for name, parameter in trained if parameter.grad is None]
        return (
            "yes"
            if trained and not idle
            else f"no: {len(idle)} adapter parameters have no gradient"
        )

    return check


def check_int8(sample: Sample) -> str:
    """Packed layers hold nearly all weights of the blocks, and the model still runs."""
    ours, ids = sample.open(), tokens(2, 12, seed=6)
    blocks = tuple(f"{stack}." for stack in ours.structure.stacks)
    whole = sum(
        p.numel() for n, p in ours.named_parameters() if n.startswith(blocks) and p.dim() > 1
    )
    quantize_(ours, "int8")
    stores = {n for n, module in ours.named_modules() if isinstance(module, PackedStore)}
    left = sum(
        p.numel()
        for n, p in ours.named_parameters()
        if n.startswith(blocks) and p.dim() > 1 and n.rpartition(".")[0] not in stores
    )
    with torch.no_grad():
        if not bool(ours(ids).logits.isfinite().all()):
            return "no: not finite"
    share = 1 - left / whole
    return "yes" if share >= _LEAST_PACKED else f"part: {share:.0%} of the block weights"


def check_layout(layout: Layout) -> Callable[[Sample], str]:
    """Return the check that a layout of two processes has the gradients of one."""

    def check(sample: Sample) -> str:
        refusal = compare_layout(sample.directory / "plain", layout)
        return f"refused: {' '.join(refusal.split())[:200]}" if refusal else "yes"

    return check


def check_stages(sample: Sample) -> str:
    """Two halves of the blocks, run one after the other, have the gradients of the model."""
    refusal = compare_stages(sample.directory / "plain")
    return f"refused: {refusal}" if refusal else "yes"


CHECKS: dict[str, Callable[[Sample], str]] = {
    "weights": check_weights,
    "loss": check_loss,
    "packed rows": check_packing,
    "generation": check_generation,
    "LoRA q, v": check_lora(["attn.q", "attn.v"]),
    "LoRA all-linear": check_lora(["all-linear"]),
    "int8": check_int8,
    "TP 2": check_layout(Layout(tp=2)),
    "PP 2": check_stages,
    "EP 2": check_layout(Layout(zero=3, ep=2)),
}


def measure_type(kind: str, checks: Iterable[str] = tuple(CHECKS)) -> dict[str, str]:
    """Return the results of the named checks of one type."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            sample = Sample(kind, Path(folder))
        except Exception as error:  # any code of transformers may fail at small sizes
            return {"built": f"no: {_one_line(error)}"}
        row = {"built": "yes"}
        for name in checks:
            try:
                row[name] = CHECKS[name](sample)
            except ConfigError as error:
                row[name] = f"refused: {_one_line(error)}"
            except Exception as error:
                row[name] = f"error: {_one_line(error)}"
        return row


def _stop(*_: Any) -> None:
    raise TimeoutError(f"longer than {_SECONDS} s")


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, DistributedError):  # the last line of a worker's traceback
        text = text.strip().splitlines()[-1]
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"


def measure(file: Path, kinds: list[str]) -> None:
    """Append the results that the file does not have."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("bmforge").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _stop)
    rows = read_rows(file)
    for kind in kinds or TYPES:
        done = rows.get(kind, {})
        missing = [name for name in CHECKS if name not in done]
        if not missing or done.get("built", "yes") != "yes":
            continue
        signal.alarm(_SECONDS)
        row = measure_type(kind, missing)
        signal.alarm(0)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"type": kind, **row}) + "\n")


def read_rows(file: Path) -> dict[str, dict[str, str]]:
    """Return type -> its results; a later line of a type adds to an earlier one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows: dict[str, dict[str, str]] = {}
    for row in (json.loads(line) for line in lines if line.strip()):
        kind = row.pop("type")
        rows[kind] = {**rows.get(kind, {}), **row}
    return rows


def write(file: Path) -> None:
    """Write the page; types without a row are listed as not tested."""
    rows = read_rows(file)
    built = {kind: row for kind, row in sorted(rows.items()) if row["built"] == "yes"}
    lines = [
        "# Capabilities of transformers models",
        "",
        "This page lists the capabilities of the architectures that bmforge runs with transformers "
        f"{transformers.__version__}. `dev/transformers_table.py` tests them on small "
        "random models. `yes` means that the results equal those of plain transformers. "
        "`refused` means that a clear error gives the reason, and `error` means any other error. "
        "`part` means that only a part of the block weights is quantized, and `no` means that a "
        "check fails. For TP and EP (tensor and expert parallelism), the loss and the gradients "
        "of two processes are compared with one process. For PP (pipeline parallelism), the "
        "gradients of two stages, run one after the other, are compared with those of the full "
        "model.",
        "",
        f"{len(rows)} of {len(TYPES)} causal language models were tested. {len(built)} of them can "
        "be built at small sizes.",
        "",
        "| | " + " | ".join(CHECKS) + " |",
        "|---" * (len(CHECKS) + 1) + "|",
        "| supported | " + " | ".join(str(_count(built, name)) for name in CHECKS) + " |",
    ]
    lines += [
        f"| `{kind}` | "
        + " | ".join(row.get(n, "not tested").partition(":")[0] for n in CHECKS)
        + " |"
        for kind, row in built.items()
    ]
    lines += ["", "## Reasons", ""]
    lines += _reason_lines(rows)
    missing = [kind for kind in TYPES if kind not in rows]
    if missing:
        lines += ["", "## Not tested", "", ", ".join(f"`{kind}`" for kind in missing) + "."]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _reason_lines(rows: dict[str, dict[str, str]]) -> list[str]:
    """Return a line per reason, with the checks and the types that it applies to."""
    checks: dict[tuple[str, str], list[str]] = {}  # (type, reason) -> names of checks
    for kind, row in sorted(rows.items()):
        for name, value in row.items():
            if value != "yes":
                checks.setdefault((kind, _shorten(value)), []).append(f"`{name}`")
    kinds: dict[tuple[str, str], list[str]] = {}  # (names of checks, reason) -> types
    for (kind, reason), names in checks.items():
        kinds.setdefault((", ".join(names), reason), []).append(f"`{kind}`")
    lines = [
        f"- {names}: {reason.partition(': ')[0]} ({', '.join(found)}): {reason.partition(': ')[2]}"
        for (names, reason), found in kinds.items()
    ]
    return sorted(lines)


def _shorten(value: str) -> str:
    """Return a result without the name of the type and without incomplete sentences."""
    status, _, text = value.partition(": ")
    text = re.sub(r"^ConfigError: |^[et]p=2: ", "", text)
    text = text.removeprefix("TransformersModel cannot be sharded: ")
    text = re.sub(r"model_type='[^']*'", "the model type", text)
    text = re.sub(r"(this config) of a '[^']*'", r"\1", text)
    text = re.sub(r" for input of size \d+$", "", text)
    if not text.endswith(".") and ". " in text:
        text = text.rpartition(". ")[0]
    return f"{status}: {text.rstrip('.')}"


def _count(rows: dict[str, dict[str, str]], name: str) -> int:
    return sum(row.get(name) == "yes" for row in rows.values())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("measure", "write"))
    parser.add_argument("file", type=Path)
    parser.add_argument("types", nargs="*")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.file, given.types)
    else:
        write(given.file)


if __name__ == "__main__":
    main()
