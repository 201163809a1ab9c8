"""OpenAI-compatible HTTP server for an engine, with a chat page.

Start reading at `app.py` (middleware and routers) and `routes.py` (chat and completions).
`settings.py` has all limits, `openai_types.py` the request types, `connection.py` and
`lifecycle.py` the connections. `live_requests.py` connects the engine's thread to the event loop.
The files of the chat page are in `page/`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmforge.serve.app import create_app
    from bmforge.serve.lifecycle import serve
    from bmforge.serve.settings import ServeConfig

__all__ = ["ServeConfig", "create_app", "serve"]

_PLACES = {"create_app": "app", "serve": "lifecycle", "ServeConfig": "settings"}


def __getattr__(name: str) -> Any:
    """Import public names on first use, because the command line needs only the settings."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
