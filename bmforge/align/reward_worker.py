"""Worker process for one reward function; it reads calls and writes rewards as JSON lines.

`rewards.RewardProcess` starts it as ``python -m bmforge.align.reward_worker SPEC``. Unlike a
thread, a process can be killed when a user's function hangs. Lines are JSON instead of pickles. The
function has an empty standard input, and its output is redirected to standard error.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.align.reward_calls import (
    LOG_ARGUMENTS,
    STATE_ARGUMENT,
    call_reward,
    describe_error,
    find_required_columns,
)
from bmforge.align.tool_schema import describe_function
from bmforge.align.verifiers import VERIFIERS, make_verifier
from bmforge.errors import ConfigError

__all__ = ["load_function", "main"]

_ATTEMPTS = 3
# Maximum size of a reward server's response in bytes.
_MAX_BYTES = 1 << 26


def load_function(spec: str) -> Callable[..., Any]:
    """Load the reward function that a specification names.

    Args:
        spec: ``module:function``, ``file.py:function``, a verifier such as ``exact:answer``, or
            an HTTP address.

    Raises:
        ConfigError: the module, file or function does not exist.
    """
    if spec.startswith(("http://", "https://")):
        return partial(_post_all, spec)
    origin, _, name = spec.rpartition(":")
    kind, _, argument = spec.partition(":")
    if kind in VERIFIERS:
        return make_verifier(kind, argument)
    if not origin or not name:
        raise ConfigError(
            f"unknown reward: --reward {spec} (allowed: module:function, file.py:function, "
            f"dir:MODEL, an HTTP address, or a verifier: {', '.join(VERIFIERS)})."
        )
    try:
        module = _import_file(origin) if origin.endswith(".py") else importlib.import_module(origin)
    except Exception as error:
        raise ConfigError(
            f"the function {spec!r} cannot be loaded, because {origin} cannot be imported "
            f"({error!r}). Check the path, and the imports of this module."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"the function {spec!r} does not exist, because {origin} has no function {name!r}. "
            "Check the spelling."
        )
    return function


def _import_file(origin: str) -> Any:
    file = Path(origin).resolve()
    sys.path.insert(0, str(file.parent))  # so that the file can import modules next to it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"{origin} does not exist or is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _post_all(address: str, **batch: Any) -> Any:
    """Send a batch, without the log functions, to a reward server; return the rewards."""
    data = {name: value for name, value in batch.items() if name not in LOG_ARGUMENTS}
    if STATE_ARGUMENT in data:
        data[STATE_ARGUMENT] = vars(data[STATE_ARGUMENT])
    return _post(address, data)


def _post(address: str, batch: dict[str, Any]) -> Any:
    """Send a batch to a reward server and return the ``rewards`` in its response."""
    data = json.dumps(batch).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    for attempt in range(_ATTEMPTS):
        try:
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read(_MAX_BYTES))["rewards"]
        except OSError:
            if attempt + 1 == _ATTEMPTS:
                raise
    return None


async def _wait_for(out: Any) -> Any:
    return await out


def _score(function: Callable[..., Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Call a reward function, and return its rewards and logged values as JSON data."""
    reply = call_reward(function, batch)
    rewards = [_plain(value) for value in reply.rewards]
    return {"rewards": rewards, "columns": reply.columns, "metrics": reply.metrics}


def _run_tool(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Run a tool and return its result as text: strings unchanged, other values as JSON."""
    out = function(**arguments)
    out = asyncio.run(_wait_for(out)) if inspect.isawaitable(out) else out
    return out if isinstance(out, str) else json.dumps(out, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Return a reward as a JSON number or None; convert an invalid value to text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:80]
    try:
        # `float` also accepts scalars of NumPy or torch.
        return float(value)
    except Exception:  # one value must not cost the rewards of the other answers
        return repr(value)[:80]


def main() -> None:
    """Load the function named on the command line, and process calls until the input ends."""
    # The function, and programs that it starts, must neither read calls nor write replies.
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    try:
        function = load_function(sys.argv[1])
    except Exception as error:
        text = (
            str(error)
            if isinstance(error, ConfigError)
            else f"the function {sys.argv[1]!r} cannot be loaded ({error!r})."
        )
        print(json.dumps({"error": text}), file=replies, flush=True)
        return
    is_tool = sys.argv[2:] == ["tool"]
    ready = {
        "ready": True,
        "schema": describe_function(function) if is_tool else None,
        "columns": () if is_tool else find_required_columns(function),
    }
    print(json.dumps(ready), file=replies, flush=True)
    for line in calls:
        try:
            reply: dict[str, Any] = (
                {"result": _run_tool(function, json.loads(line))}
                if is_tool
                else _score(function, json.loads(line))
            )
        except Exception as error:  # a user's function may raise anything
            # The text for a tool is read by the model, which needs no file names.
            text = f"the function raised {error!r:.500}" if is_tool else describe_error(error)
            reply = {"error": text}
        print(json.dumps(reply, default=str), file=replies, flush=True)


if __name__ == "__main__":
    main()
