"""Write benchmarks/README.md: every benchmark, its subject and the pages with its results.

    python dev/benchmark_table.py

The subject is the first line of a script's docstring, and the pages are those of docs/results that
name the script. `tests/architecture` checks that the page is up to date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"
RESULTS = ROOT / "docs" / "results"
HEAD = """# Benchmarks

<!-- written by dev/benchmark_table.py -->

The scripts measure speed, memory and quality, mostly compared with another library in the same
run. Run them from the root of the repository, in the development environment (`make test` creates
it):

```bash
python -m benchmarks.training.train_step --help
make bench NAME=training.train_step ARGS="--rounds 3"
```

"Speed, A / B" is the speed of A divided by the speed of B: the median over paired rounds, with its
95 % interval. Above 1, A is faster. `harness.py` has the shared parts. The
[results](../docs/results/index.md) explain how figures are published.
"""


def is_script(path: Path) -> bool:
    """Return True for scripts; modules that others import have no main block."""
    return 'if __name__ == "__main__":' in path.read_text("utf-8")


def is_helper(path: Path) -> bool:
    """Return True for programs that another script starts."""
    return path.stem.endswith(("_peer", "_worker"))


def scripts() -> list[Path]:
    """Return all benchmarks, without the programs that they start."""
    paths = sorted(BENCHMARKS.glob("*/*.py"))
    return [path for path in paths if is_script(path) and not is_helper(path)]


def pages_of(script: Path) -> list[Path]:
    """Return the pages of docs/results that name a script as a module or as a file."""
    name = re.compile(rf"\bbenchmarks[./]{script.parent.name}[./]{script.stem}\b")
    return [page for page in sorted(RESULTS.glob("*.md")) if name.search(page.read_text("utf-8"))]


def render() -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    for folder in dict.fromkeys(path.parent for path in scripts()):
        lines += [f"## {folder.name}\n", "| script | measures | results |", "|---|---|---|"]
        for path in scripts():
            if path.parent != folder:
                continue
            docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
            assert docstring, path
            links = ", ".join(
                f"[{page.stem}](../docs/results/{page.name})" for page in pages_of(path)
            )
            subject = docstring.partition("\n")[0].removesuffix(".")
            lines.append(f"| `{path.stem}` | {subject} | {links or 'no page'} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
