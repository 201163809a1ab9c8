"""Counts the files that a command, an import, or one config object passes through.

    python dev/walk.py import bmforge.infer.sampling
    python dev/walk.py run prepare --out /tmp/walk --vocab-size 300
    python dev/walk.py run --of RunConfig train pretrain --model gpt2-tiny --data /tmp/walk ...

`import` lists the modules of bmforge that an import loads. `run` runs a command of `bmforge` in
this process, and lists the files of bmforge in which a function was called; with `--of CLASS`, only
those in which a function was given an object of that class, or of a subclass, as an argument. A
function that receives only a part of a config does not count.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import bmforge
from bmforge.cli import main as run_bmforge

ROOT = Path(bmforge.__file__).parent


class Walk:
    """Profile function that counts the calls of functions of bmforge by file.

    Args:
        class_name: count only the calls with an argument of this class; None counts all calls.
    """

    def __init__(self, class_name: str | None) -> None:
        self.class_name = class_name
        self.calls: Counter[str] = Counter()
        self.functions: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        if code.co_name in ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            return
        if self.class_name is not None and not self.is_passed(frame):
            return
        file = str(Path(code.co_filename).relative_to(ROOT.parent))
        self.calls[file] += 1
        self.functions.add(f"{file}:{code.co_qualname}")

    def is_passed(self, frame: FrameType) -> bool:
        """Return True if an argument of the called function is of the class, `self` excepted."""
        values = inspect.getargvalues(frame)
        names = [*values.args, *filter(None, (values.varargs, values.keywords))]
        arguments = [values.locals.get(name) for name in names if name != "self"]
        return any(
            kind.__name__ == self.class_name for value in arguments for kind in type(value).__mro__
        )


def list_imports(module: str) -> list[str]:
    """Return the modules of bmforge that are loaded after importing one of them."""
    importlib.import_module(module)
    return sorted(name for name in sys.modules if name.split(".")[0] == "bmforge")


def run_command(arguments: list[str], class_name: str | None) -> Walk:
    """Run a command of bmforge and return the calls that it made."""
    walk = Walk(class_name)
    threading.setprofile(walk)
    sys.setprofile(walk)
    sys.argv = ["bmforge", *arguments]
    try:
        run_bmforge()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    return walk


def main() -> None:
    """Print the files and their number."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("import").add_argument("module")
    run = kinds.add_parser("run")
    run.add_argument("--of", metavar="CLASS", help="count only functions that are given such a one")
    run.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.kind == "import":
        modules = list_imports(options.module)
        print(*modules, f"{len(modules)} modules", sep="\n")
        return
    walk = run_command(options.command, options.of)
    for file, count in sorted(walk.calls.items()):
        print(f"{count:8} {file}")
    print(f"{len(walk.calls)} files, {len(walk.functions)} functions")


if __name__ == "__main__":
    main()
