"""What importing the inference package loads, which is what every command starts with."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Each takes longer to import than the whole package, and few commands need it.
LATE = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers")
# Modules of bmforge that an import loads at most. The engine includes everything that batches,
# streams and constrains requests.
MOST_MODULES = {
    "bmforge.infer.sampling": 8,
    "bmforge.infer.generation": 155,
    "bmforge.infer.engine": 265,
    "bmforge.models": 124,
}

PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("module", MOST_MODULES)
def test_importing_a_module_loads_what_it_needs(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert [name for name in LATE if name in loaded] == []
    assert sum(name.split(".")[0] == "bmforge" for name in loaded) <= MOST_MODULES[module]
