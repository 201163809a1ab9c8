"""The server: an engine for programs that speak OpenAI's protocol, and for a person at a page.

Start reading at `app.py` (what stands in front of every request) and `routes.py` (what can be
asked). `settings.py` has every limit, `openai_types.py` what a request may say, `receive.py` and
`lifecycle.py` run the connections. `live.py` joins the engine's thread with the event loop. The
page is in `page/`.
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
    """Import a public name when it is asked for: the command line needs the settings alone."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
