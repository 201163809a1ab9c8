"""What importing the inference package loads, which is what every command starts with."""

from __future__ import annotations

import json
import subprocess
import sys

# Each takes longer to import than the whole package, and few commands need it.
LATE = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers")
MOST_MODULES = 310  # 38 of them families

PROGRAM = """
import json, sys
import bmforge.infer
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_inference_loads_little() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert [name for name in LATE if name in loaded] == []
    assert sum(name.split(".")[0] == "bmforge" for name in loaded) <= MOST_MODULES
