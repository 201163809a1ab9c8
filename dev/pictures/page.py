"""Take screenshots of the server's chat page, or of a run's report, into docs/pictures.

    python dev/pictures/page.py [--chromium /usr/bin/chromium-headless-shell]
    python dev/pictures/page.py --report runs/quickstart/report.html

For the chat page, a server with a scripted engine runs in this process; Chromium shows its page on
a desktop and on a phone, in light and dark.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serve")]
FOLDER = ROOT / "docs" / "pictures"
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
QUESTION = "How many steps does bisection need?"
ANSWER = r"""<think>
Each step halves the interval. So the length after n steps is (b - a) / 2^n.
</think>

Each step halves the interval, so after $n$ steps the error is at most

$$\frac{b - a}{2^{n+1}}$$

| error | steps on $[0, 1]$ |
|---|---:|
| 0.01 | 6 |
| 0.000001 | 19 |

```python
def bisect(f, low, high, error):
    while high - low > error:
        middle = (low + high) / 2  # keep the root inside
        if f(low) * f(middle) <= 0:
            high = middle
        else:
            low = middle
    return (low + high) / 2
```
"""


@contextmanager
def page_server(folder: Path) -> Iterator[str]:
    """Serve a tiny model, whose answers are `ANSWER`, in a thread; yields the address."""
    from scripted_engine import ScriptedEngine
    from tiny_chat_model import write_model

    from bmforge.infer import Engine, EngineConfig
    from bmforge.serve.app import create_app
    from bmforge.serve.lifecycle import bind_address, make_server
    from bmforge.serve.settings import ServeConfig

    directory = write_model(folder / "demo-model")
    settings = directory / "tokenizer_config.json"  # a template of a model with reasoning
    settings.write_text(settings.read_text().replace("{%- if tools", "{#<think>#}{%- if tools"))
    config = ServeConfig(port=0, log_requests=False)
    with Engine(directory, config=EngineConfig(max_tokens=2048)) as engine:
        scripted: Any = ScriptedEngine(engine, ANSWER, size=40)
        listener = bind_address(config)
        server = make_server(create_app(scripted, config, directory=directory), listener)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{_port(listener)}"
        finally:
            server.should_exit = True
            thread.join()


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def take(browser: Any, url: str, size: str, scheme: str) -> None:
    """Ask the question on the page and take a screenshot of the answer."""
    width, height = SIZES[size]
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    context = browser.new_context(**options, locale="en-US", is_mobile=size == "phone")
    page = context.new_page()
    page.goto(url)
    page.locator("#model:not(:empty)").wait_for()
    page.fill("#chat-text", QUESTION)
    page.press("#chat-text", "Enter")
    page.locator("li.assistant .actions").wait_for()
    page.locator("li.assistant .thoughts summary").click()
    page.locator("li.user").scroll_into_view_if_needed()
    page.screenshot(path=str(FOLDER / f"page_{size}_{scheme}.png"))
    context.close()


def take_report(browser: Any, report: Path) -> None:
    """Take screenshots of a run's report page, in light and dark."""
    for scheme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 1000, "height": 800}, color_scheme=scheme, locale="en-US"
        )
        page = context.new_page()
        page.goto(report.resolve().as_uri())
        page.screenshot(path=str(FOLDER / f"report_{scheme}.png"))
        context.close()


def take_chat(browser: Any) -> None:
    """Take screenshots of the chat page at every size, in light and dark."""
    with tempfile.TemporaryDirectory() as name, page_server(Path(name)) as url:
        for size in SIZES:
            for scheme in ("light", "dark"):
                take(browser, url, size, scheme)


def main() -> None:
    """Take the screenshots of the report, or those of the chat page."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    parser.add_argument("--chromium", default=found, help="the browser, a program")
    parser.add_argument("--report", type=Path, help="report.html of a run; takes only its picture")
    options = parser.parse_args()
    if options.chromium is None:
        parser.error("Chromium is not installed. Install Debian's chromium-headless-shell.")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        if options.report is None:
            take_chat(browser)
        else:
            take_report(browser, options.report)
        browser.close()


if __name__ == "__main__":
    main()
