"""Registry of the adapters of a served model; they can be loaded and removed at run time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from bmforge.errors import BmforgeError
from bmforge.infer.engine.runtime_adapters import load_adapter_, remove_adapter_
from bmforge.logging import get_logger
from bmforge.serve.errors import RequestError

__all__ = ["AdapterRegistry", "LoadAdapter"]

LoadAdapter = Callable[[Any, Path, str], None]


class AdapterRegistry:
    """Adapters that requests select by giving their name as the model's name.

    The methods may only be called from the event loop's thread.

    Args:
        engine: engine of the main model.
        names: initial dict from adapter name in requests to adapter name in the model.
        load: function (engine, directory, name in the model) that loads an adapter.

    Attributes:
        names: dict from adapter name in requests to adapter name in the model.
    """

    def __init__(
        self, engine: Any, names: Mapping[str, str], load: LoadAdapter = load_adapter_
    ) -> None:
        self._engine, self.names, self._load_ = engine, dict(names), load
        self._users: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._changing = asyncio.Lock()

    @contextmanager
    def use(self, inner: str | None) -> Iterator[None]:
        """Context manager that keeps an adapter attached while a request uses it.

        Args:
            inner: name of the adapter in the model; None for the base model.
        """
        if inner is None:
            yield
            return
        self._users[inner] = self._users.get(inner, 0) + 1
        try:
            yield
        finally:
            self._users[inner] -= 1
            if not self._users[inner]:
                del self._users[inner]
                if inner in self._leaving:
                    task = asyncio.get_running_loop().create_task(self._detach(inner))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def load(self, name: str, directory: Path, taken: Callable[[], list[str]]) -> None:
        """Load an adapter under a new name.

        Args:
            name: name in requests.
            directory: directory of the adapter.
            taken: function that returns the names of all models.

        Raises:
            RequestError: the name is taken, the directory has no adapter, or the adapter does
                not fit the model.
        """
        async with self._changing:
            if name in taken():
                raise RequestError(
                    (
                        f"lora_name={name!r} is already in use. Use another name, or unload the "
                        "adapter with this name first."
                    ),
                    "lora_name",
                )
            if not await run_in_threadpool(directory.is_dir):
                raise RequestError(
                    f"lora_path={str(directory)!r} is not a directory on the server's machine. "
                    "Pass the directory of a saved adapter.",
                    "lora_path",
                    status=404,
                    code="not_found",
                )
            self._count += 1  # names are not reused, because cached prompts belong to a name
            inner = f"loaded{self._count}"
            try:
                await run_in_threadpool(self._load_, self._engine, directory, inner)
            except BmforgeError as error:
                raise RequestError(str(error), "lora_path", code="invalid_value") from error
            self.names[name] = inner
        get_logger().info("adapter %r loaded from %s", name, directory)

    async def unload(self, name: str) -> None:
        """Remove an adapter for new requests; running requests keep it until they end.

        Raises:
            RequestError: there is no adapter with this name.
        """
        inner = self.names.pop(name, None)
        if inner is None:
            raise RequestError(
                f"lora_name={name!r} is not a loaded adapter. GET /v1/models lists all models.",
                "lora_name",
                status=404,
                code="not_found",
            )
        self._leaving.add(inner)
        if inner not in self._users:
            await self._detach(inner)
        get_logger().info("adapter %r removed", name)

    async def _detach(self, inner: str) -> None:
        """Remove an unused adapter from the model; log an error instead of raising it."""
        self._leaving.discard(inner)
        try:
            await run_in_threadpool(remove_adapter_, self._engine, inner)
        except BmforgeError as error:
            get_logger().error("an adapter could not be removed from the engine: %s", error)
