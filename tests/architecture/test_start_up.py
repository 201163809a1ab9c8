"""Modules that importing the inference package and quantizing a model may load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bmforge.models import GPT2, GPT2Config

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


QUANTIZE = """
import sys
from bmforge.models.quantize import quantize_directory
quantize_directory(sys.argv[1], sys.argv[2], "int4")
print("torch._dynamo" in sys.modules)
"""


def test_quantizing_a_model_does_not_load_the_compiler(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    GPT2.from_config(GPT2Config(**sizes)).save_pretrained(tmp_path / "plain")
    command = [sys.executable, "-c", QUANTIZE, str(tmp_path / "plain"), str(tmp_path / "int4")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
