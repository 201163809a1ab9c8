"""List the imports of the old packages that resolve in `bmforge.compat`, by program.

    python dev/old_imports.py CHECKOUTS [--all]

CHECKOUTS is a folder with checkouts of the upstream repositories. Every .py file and notebook that
imports one of the packages is read; nothing is run. Prints a row per repository, and the imports
that fail with the reason (with --all also those that name a replacement).
"""

from __future__ import annotations

import argparse
import ast
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = ("bmtrain", "model_center", "opendelta", "openprompt", "bmcook", "bminf", "megatron")
RENAMED = {"megatron": "cpm_pretrain"}


def sources(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, Python source) of scripts and notebooks."""
    for path in sorted(folder.rglob("*.py")):
        yield path, path.read_text("utf-8", errors="ignore")
    for path in sorted(folder.rglob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8")).get("cells", [])
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        lines = [line for text in code for line in text.splitlines() if line[:1] not in "%!"]
        yield path, "\n".join(lines)


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of the imports of old packages; name is "" for `import module`."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in names if module.split(".")[0] in PACKAGES)


@cache
def resolve(module: str, name: str) -> str:
    """Return "" if an import resolves, or its error."""
    package, _, inside = module.partition(".")
    target = ".".join(filter(None, ("bmforge.compat", RENAMED.get(package, package), inside)))
    try:
        exec(f"from {target} import {name}" if name else f"import {target}", {})
    except Exception as error:  # any error of an import is what this script reports
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    failures: dict[str, set[str]] = defaultdict(set)
    print("| repository | programs | resolve | name a replacement | fail |\n|---|---|---|---|---|")
    for folder in sorted(p for p in options.checkouts.iterdir() if p.is_dir()):
        counts = [0, 0, 0]
        for path, source in sources(folder):
            errors = [resolve(*pair) for pair in set(imports(source))]
            if not errors:
                continue
            bare = [e for e in errors if e and "gone. Use" not in e and "no counterpart" not in e]
            counts[2 if bare else 1 if any(errors) else 0] += 1
            for error in filter(None, errors):
                if error in bare or options.all:
                    failures[error].add(str(path.relative_to(folder.parent)))
        if sum(counts):
            print(f"| {folder.name} | {sum(counts)} | {counts[0]} | {counts[1]} | {counts[2]} |")
    for error, files in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(files):3d} {error[:200]}\n      {', '.join(sorted(files)[:3])}")


if __name__ == "__main__":
    main()
