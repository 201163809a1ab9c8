"""Routes of the chat page, which loads nothing from other hosts."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from bmforge.serve.errors import RequestError
from bmforge.serve.serving import serving_of

__all__ = ["router"]

router = APIRouter(include_in_schema=False)
# With Trusted Types, the browser prevents scripts from creating HTML from text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_SCRIPTS = (
    *("chat", "client", "elements", "highlight", "markdown", "math", "page", "store"),
    *("symbols", "words"),
)
_KINDS |= {f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS}
_FILES = files("bmforge.serve") / "page"


def _send(name: str) -> Response:
    headers = {"content-security-policy": _POLICY}
    return Response((_FILES / name).read_bytes(), media_type=_KINDS[name], headers=headers)


@router.get("/")
async def index() -> Response:
    """Return the chat page."""
    return _send("index.html")


@router.get("/page/state")
async def state(request: Request) -> Response:
    """Return the server status that the chat page shows."""
    serving = serving_of(request)
    plan = serving.engine.plan
    parts = [[name, size] for name, size in plan.parts()]
    status = await run_in_threadpool(serving.engine.requests_status)  # may wait for the model
    return JSONResponse(
        {
            "model": serving.name,
            "models": [m.name for m in serving.models if m.abilities == serving.main.abilities],
            "abilities": serving.main.abilities,
            "license": serving.main.licenses["license"],
            "max_tokens": serving.engine.config.tokens_of(serving.engine.model),
            "budget_bytes": plan.budget_bytes,
            "parts": parts,
            "running": status.running,
            "waiting": status.waiting,
            "pages_used": status.pages_used,
            "pages_free": status.pages_free,
        }
    )


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """Return a file that belongs to the chat page."""
    if name not in _KINDS:
        raise RequestError(
            "the chat page has no file with this name. Open the page at /.", status=404
        )
    return _send(name)
