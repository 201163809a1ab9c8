"""A program that ends while threads are at work ends well, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bmforge.memory.copies import make_copy_engine
from bmforge.threads import _RUNNING, start_thread

ROOT = Path(__file__).resolve().parents[1]
BUSY = """
import threading, torch
torch.set_num_threads(1)
begun, matrix = threading.Event(), torch.ones(700, 700)
def multiply(*_):
    begun.set()
    for _ in range(20):
        torch.mm(matrix, matrix)
"""
PROGRAMS = {
    "a copy engine, and what it was asked besides": """
from bmforge.memory.copies import make_copy_engine
engine = make_copy_engine(torch.device("cpu"))
engine.run(multiply)
later = [engine.run(lambda: print("came too late")) for _ in range(9)]
""",
    "one that nobody holds any more": """
from bmforge.memory.copies import make_copy_engine
make_copy_engine(torch.device("cpu")).run(multiply)
""",
    "a loader": """
from bmforge.data.load.prefetch import Prefetcher
ahead = Prefetcher(multiply, 0, 9)
""",
    "an engine whose blocks come and go": """
from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request
from bmforge.models import Llama, LlamaConfig
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 12, "num_heads": 2}
model = Llama.from_config(LlamaConfig(vocab_size=64, **sizes)).eval()
config = EngineConfig(max_tokens=1000)
try:
    Engine(model, device_budget_bytes=1, config=config)
except ConfigError as error:
    least = int(str(error).split("too small: ")[1].split()[0])
engine = Engine(model, device_budget_bytes=least, config=config)
assert engine.plan.moved_bytes
model.layers["0"].register_forward_hook(multiply)
engine.submit(Request([1, 2, 3], GenerationConfig(max_new_tokens=900, eos_token_id=())))
""",
    "an engine": """
from bmforge.infer import Engine, GenerationConfig, Request
from bmforge.models import Llama, LlamaConfig
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
model = Llama.from_config(LlamaConfig(vocab_size=64, **sizes)).eval()
model.layers["0"].register_forward_hook(multiply)
engine = Engine(model)
engine.submit(Request([1, 2, 3], GenerationConfig(max_new_tokens=900, eos_token_id=())))
""",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_ends_beside(what: str) -> None:
    code = BUSY + PROGRAMS[what] + "begun.wait()\nprint('over')\n"
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_what_is_asked_at_the_end_fails() -> None:
    """Whoever waits for a task that was dropped hears of it."""
    engine, goes_on = make_copy_engine(torch.device("cpu"), "bmforge-test"), threading.Event()
    engine.run(goes_on.wait)  # type: ignore[arg-type]
    ticket = engine.run(lambda: None, "a step")
    (end,) = [end for thread, end in _RUNNING.items() if thread.name == "bmforge-test"]
    end()
    goes_on.set()
    with pytest.raises(RuntimeError, match="a step was not run, because the program exits"):
        ticket.wait()


def test_a_thread_that_is_over_is_forgotten() -> None:
    thread = start_thread("bmforge-test", lambda: None, end=lambda: None)
    thread.join()
    assert thread not in _RUNNING
