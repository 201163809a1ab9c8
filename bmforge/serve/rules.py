"""Validates constraints on answers (schemas, regular expressions, grammars) before use."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from bmforge.infer.engine.constraint import Constraint
from bmforge.serve import schema_check
from bmforge.serve.errors import RequestError, overload_error
from bmforge.serve.limits import check_at_most
from bmforge.serve.settings import SchemaLimits
from bmforge.serve.strict_json import json_depth
from bmforge.serve.tools import LITERAL_KEYWORDS

__all__ = ["RuleChecker"]

_KEPT = 512  # maximum number of cached results
_AT_ONCE = 2
_FIELD = {"json": "response_format", "regex": "structured_outputs", "lark": "structured_outputs"}


class RuleChecker:
    """Validates constraints by compiling them in separate processes, and caches the results.

    Args:
        limits: limits on constraints.
    """

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._verdicts: OrderedDict[Constraint, str | None] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        # Only one rule per client at a time, so that no client uses both processes.
        self._client_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, rule: Constraint, client: str, name: str | None = None) -> None:
        """Validate a constraint on answers.

        Args:
            rule: constraint on the answers.
            client: key or address of the client that sent the constraint.
            name: request field that contains the constraint (default: the field for this kind of
                constraint).

        Raises:
            RequestError: the constraint is too large or too deep, has an external reference, is
                unsupported, or takes too long to compile.
        """
        name = name or _FIELD[rule.kind]
        size = len(rule.source.encode())
        check_at_most(name, size, self._limits.max_schema_bytes, "bytes of rules")
        if rule.kind == "json":
            self._check_schema(json.loads(rule.source), name)
        if rule in self._verdicts:
            self._verdicts.move_to_end(rule)
        else:
            self._verdicts[rule] = await self._compile(rule, client)
            while len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        problem = self._verdicts[rule]
        if problem is not None:
            raise RequestError(
                f"{name}: the constraint is not supported ({problem[:300]}).",
                name,
                code="invalid_schema",
            )

    def _check_schema(self, schema: Any, name: str) -> None:
        depth = json_depth(schema)
        check_at_most(name, depth, self._limits.max_schema_depth, "levels of the schema")
        remaining = [schema]
        while remaining:
            item = remaining.pop()
            if isinstance(item, dict):
                target = item.get("$ref", item.get("$dynamicRef", "#"))
                if isinstance(target, str) and not target.startswith("#"):
                    raise RequestError(
                        f"{name}: $ref={target!r:.80} refers to another document (supported: "
                        "'#/...' inside the schema). Copy that schema into $defs.",
                        name,
                        code="invalid_schema",
                    )
                remaining += [value for key, value in item.items() if key not in LITERAL_KEYWORDS]
            elif isinstance(item, list):
                remaining += item

    async def _compile(self, rule: Constraint, client: str) -> str | None:
        """Compile a constraint in a limited process; return the error message, or None if valid."""
        limits = self._limits
        try:
            own_turn = self._client_turns.setdefault(client, asyncio.Lock())
            async with asyncio.timeout(limits.schema_s), own_turn, self._turns:
                return await self._run(rule)
        except TimeoutError:
            raise overload_error(
                "too many constraints are waiting to be compiled. Retry later.", limits.schema_s
            ) from None

    async def _run(self, rule: Constraint) -> str | None:
        limits = self._limits
        job = {
            "kind": rule.kind,
            "source": await asyncio.to_thread(lambda: rule.supported_source),
            "cpu_s": limits.schema_cpu_s,
            "memory_bytes": limits.schema_memory_bytes,
            "wall_s": limits.schema_s,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(Path(schema_check.__file__)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        try:
            out, _ = await process.communicate(json.dumps(job).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            return _tell_end(process.returncode, limits)
        error = json.loads(out)["error"]
        return None if error is None else str(error)


def _tell_end(status: int, limits: SchemaLimits) -> str:
    if -status in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
        return f"its compilation takes longer than {limits.schema_cpu_s} s"
    return f"its compilation needs more than {limits.schema_memory_bytes >> 20} MiB"
