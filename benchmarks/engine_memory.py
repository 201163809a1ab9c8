"""Peak memory of engines above their imports, beside their budgets; docs/results has the figures.

    python benchmarks/engine_memory.py [--models llama t5]

Every case runs in a process of its own, in a control group whose limit is the budget and 2 %, which
counts the file cache; where no group can be made, the resident set is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402

from bmforge.testing.limited_engine import CASES, MODELS, run_limited  # noqa: E402

MIB = 1 << 20


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    chosen = parser.parse_args().models
    print(header("python benchmarks/engine_memory.py", 1, ("torch",)))
    rows = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            MODELS[name]().save_pretrained(folder)
            for case in (case for case in CASES if case.model == name):
                found = run_limited(Path(folder), case)
                sizes = [found[key] / MIB for key in ("weights", "budget", "planned", "peak")]
                rows.append(
                    [
                        f"{name}, {case.dtype}, {case.tokens} tokens",
                        f"{found['resident']} of {found['resident'] + found['moved']}",
                        *(f"{size:.1f}" for size in sizes),
                        f"{found['peak'] / found['budget']:.2f}",
                        found["kind"],
                    ]
                )
    titles = ["model", "blocks that stay", "weights", "budget", "planned", "peak"]
    print(table([*titles, "peak / budget", "counted by"], rows))


if __name__ == "__main__":
    main()
