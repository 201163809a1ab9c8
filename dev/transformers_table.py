#!/usr/bin/env python3
"""Write docs/reference/capabilities_transformers.md: the capabilities of each model type.

    python dev/transformers_table.py measure rows.jsonl [TYPE ...] [--head HEAD]
    python dev/transformers_table.py write rows.jsonl

`measure` checks small random models of the named types (all types of the installed transformers
without names) with one head against plain transformers, and appends a line per type. Checks that
the file has a result of are skipped, so the work can be divided. `write` makes the page from the
lines. The checks are in `transformers_checks.py`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
from pathlib import Path

import transformers
from transformers_checks import CAUSAL_CHECKS, HEAD_CHECKS, checks_of, measure_type

from bmforge.models.transformers.library import AUTO_CLASSES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "capabilities_transformers.md"
CAUSAL = "language_model"
HEADS = {  # head -> title of its section
    "sequence_to_sequence": "Sequence-to-sequence models",
    "masked_lm": "Masked language models",
    "sequence_classification": "Sequence classifiers",
    "token_classification": "Token classifiers",
    "image_text_to_text": "Image-text-to-text models",
    "speech_to_text": "Speech-to-text models",
}
Rows = dict[str, dict[str, str]]  # type -> check -> result


def types_of(head: str) -> tuple[str, ...]:
    """Return the model types that transformers has with a head."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return tuple(getattr(auto, AUTO_CLASSES[head][1]))


def measure(file: Path, head: str, kinds: list[str]) -> None:
    """Append the results that the file does not have."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("bmforge").setLevel(logging.ERROR)
    rows = read_rows(file)[head]
    for kind in kinds or types_of(head):
        done = rows.get(kind, {})
        missing = [name for name in checks_of(head) if name not in done]
        if not missing or done.get("built", "yes") != "yes":
            continue
        row = measure_type(kind, head, missing)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"type": kind, "head": head, **row}) + "\n")


def read_rows(file: Path) -> dict[str, Rows]:
    """Return head -> type -> results; a later line of a type adds to an earlier one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    heads: dict[str, Rows] = {head: {} for head in (CAUSAL, *HEADS)}
    for row in (json.loads(line) for line in lines if line.strip()):
        kind, rows = row.pop("type"), heads[row.pop("head", CAUSAL)]
        rows[kind] = {**rows.get(kind, {}), **row}
    return heads


def write(file: Path) -> None:
    """Write the page; types without a row are listed as not tested."""
    heads = read_rows(file)
    rows = heads[CAUSAL]
    built = _built(rows)
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
        "## Causal language models",
        "",
        f"{len(rows)} of {len(types_of(CAUSAL))} causal language models were tested. {len(built)} "
        "of them can be built at small sizes.",
        "",
        *_table(built, list(CAUSAL_CHECKS)),
        "",
        "### Reasons",
        "",
        *_reason_lines(rows),
        *_untested(CAUSAL, rows),
        "",
        "## Other models",
        "",
        "`loss` compares the loss and all gradients with those of plain transformers. `LoRA` "
        "attaches adapters to all linear layers, and those of trained layers must get a gradient. "
        "`int8` quantizes nearly all weights of the blocks. `ZeRO-3` "
        "compares the loss and the gradients of two processes with one process. The input has an "
        "image or sound if the column `input` says so, otherwise only text.",
    ]
    for head, title in HEADS.items():
        lines += _head_section(head, title, heads[head])
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head_section(head: str, title: str, rows: Rows) -> list[str]:
    """Return the lines of the section of a head; types that pass every check share a line."""
    small = _built(rows)
    built = {kind: row for kind, row in small.items() if row["inputs"] != "none"}
    names = list(HEAD_CHECKS)
    full = [kind for kind, row in built.items() if all(row.get(name) == "yes" for name in names)]
    rest = {kind: row for kind, row in built.items() if kind not in full}
    other = [f"`{kind}`" for kind in full if built[kind]["inputs"] != "text"]
    lines = [
        "",
        f"### {title}",
        "",
        f"{len(small)} of {len(types_of(head))} types can be built at small sizes, and the script "
        f"has an example input for {len(built)} of them. {len(full)} pass all checks ("
        + ", ".join(f"{name}: {_count(built, name)}" for name in names)
        + ").",
        "",
        "All checks pass: " + ", ".join(f"`{kind}`" for kind in full) + ".",
    ]
    if other:
        lines += ["", "Tested with an image or sound: " + ", ".join(other) + "."]
    if rest:
        lines += ["", *_table(rest, ["inputs", *names], counts=False)]
    if reasons := _reason_lines(rows):
        lines += ["", *reasons]
    return [*lines, *_untested(head, rows)]


def _built(rows: Rows) -> Rows:
    return {kind: row for kind, row in sorted(rows.items()) if row["built"] == "yes"}


def _table(built: Rows, names: list[str], *, counts: bool = True) -> list[str]:
    """Return the lines of a table with a row per type, after a row of counts."""
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    if counts:
        lines.append("| supported | " + " | ".join(str(_count(built, n)) for n in names) + " |")
    for kind, row in built.items():
        cells = (row.get(name, "not tested").partition(":")[0] for name in names)
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    return lines


def _untested(head: str, rows: Rows) -> list[str]:
    missing = [f"`{kind}`" for kind in types_of(head) if kind not in rows]
    return ["", "Not tested: " + ", ".join(missing) + "."] if missing else []


def _reason_lines(rows: Rows) -> list[str]:
    """Return a line per reason, with the checks and the types that it applies to."""
    checks: dict[tuple[str, str], list[str]] = {}  # (type, reason) -> names of checks
    for kind, row in sorted(rows.items()):
        for name, value in row.items():
            if value != "yes" and name != "inputs":
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


def _count(rows: Rows, name: str) -> int:
    return sum(row.get(name) == "yes" for row in rows.values())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("measure", "write"))
    parser.add_argument("file", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--head", choices=(CAUSAL, *HEADS), default=CAUSAL)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.file, given.head, given.types)
    else:
        write(given.file)


if __name__ == "__main__":
    main()
