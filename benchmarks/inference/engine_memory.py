"""Peak memory of engines compared with their memory budgets.

    python -m benchmarks.inference.engine_memory [--models llama t5]

Each case runs in a new process, in a control group with the limit of the budget plus 2 %. The
control group counts the page cache too. Where no control group can be created, the resident memory
above the imports is measured. `--models` selects the models of `bmforge.testing.limited_engine`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness import header, make_parser, table
from bmforge.testing.limited_engine import CASES, MODELS, run_limited

MIB = 1 << 20


def main() -> None:
    """Run the cases and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    chosen = parser.parse_args().models
    print(header(1, ("torch",)))
    rows = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            MODELS[name]().save_pretrained(folder)
            for case in (case for case in CASES if case.model == name):
                result = run_limited(Path(folder), case)
                sizes = [result[key] / MIB for key in ("weights", "budget", "planned", "peak")]
                rows.append(
                    [
                        f"{name}, {case.dtype}, {case.tokens} tokens",
                        f"{result['resident']} of {result['resident'] + result['moved']}",
                        *(f"{size:.1f}" for size in sizes),
                        f"{result['peak'] / result['budget']:.2f}",
                        result["kind"],
                    ]
                )
    titles = [
        "model",
        "blocks in memory",
        "weights, MiB",
        "budget, MiB",
        "planned, MiB",
        "peak, MiB",
    ]
    print(table([*titles, "peak / budget", "measured by"], rows))


if __name__ == "__main__":
    main()
