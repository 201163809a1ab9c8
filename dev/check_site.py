"""Check the built site in a browser: every page at two sizes, and the answers of its search.

    make docs
    python dev/check_site.py [--site site] [--screenshots FOLDER]

Every page is opened on a desktop and on a phone. A page fails if it is wider than the screen, has
an image that does not load, requests a missing file or one of another host, or raises an error. A
question fails if the search's first result is another page. The exit status is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# Questions of users -> pages that answer them; the first result must be one of these.
QUESTIONS = {
    "QLoRA": ("howto/qlora/",),
    "export to GGUF": ("howto/export_gguf/",),
    "continue pretraining": ("howto/continue_pretraining/",),
    "two GPUs": ("howto/two_gpus/",),
    "resume training": ("howto/resume/",),
    "deploy behind nginx": ("howto/nginx/",),
    "Slurm": ("howto/slurm/",),
    "DPO": ("guides/post_training/", "tutorials/post_training/"),
    "long context": ("howto/long_context/",),
    "merge LoRA": ("howto/merge_lora/",),
    "BMTrain": ("migrating/",),
    "file formats": ("reference/file_formats/",),
    "bit-identical": ("explanation/numerics/",),
    "量化": ("zh/tutorials/compress/", "zh/howto/qlora/"),
    "断点续训": ("zh/howto/resume/",),
    "部署": ("zh/howto/nginx/", "zh/tutorials/tune_and_serve/"),
    "多卡": ("zh/howto/two_gpus/",),
    "合并适配器": ("zh/howto/merge_lora/",),
    "后训练": ("zh/tutorials/post_training/", "zh/guides/finetuning/"),
    "去重": ("zh/tutorials/prepare_and_pretrain/", "zh/tutorials/quickstart/"),
}
SHOTS = (  # pages whose screenshots show every kind of content
    *("", "tutorials/quickstart/", "howto/qlora/", "guides/data/", "explanation/layouts/"),
    *("reference/commands/", "reference/capabilities/", "reference/api/infer/", "results/runtime/"),
    *("zh/", "zh/tutorials/prompts/", "zh/howto/nginx/", "zh/glossary/"),
)
WIDER = "document.documentElement.scrollWidth - window.innerWidth"
BROKEN = "Array.from(document.images).filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without writing a line per request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


class SiteServer(http.server.ThreadingHTTPServer):
    """Serves the site to a browser, which may leave a page before all of it was sent."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the browser closed; report other errors as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve(site: Path) -> Iterator[str]:
    """Serve a folder on the local address in a thread; yields the URL."""
    handler = functools.partial(QuietHandler, directory=str(site))
    server = SiteServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def open_page(browser: Any, size: str, scheme: str = "light") -> Any:
    """Return an empty browser tab of a size and a color scheme."""
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, is_mobile=size == "phone")
    return context.new_page()


def find_faults(page: Any, url: str, path: str) -> list[str]:
    """Open a page of the site and return its faults."""
    faults: list[str] = []

    def on_request(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            faults.append(f"requests {request.url}")

    def on_response(response: Any) -> None:
        # The language switch looks for a sitemap below the page in the other language.
        if response.status >= 400 and not response.url.endswith("/sitemap.xml"):
            faults.append(f"gets status {response.status} of {response.url}")

    def on_error(error: Any) -> None:
        faults.append(f"raises {error}")

    listeners = {"request": on_request, "response": on_response, "pageerror": on_error}
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(url + path)
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    if (wider := page.evaluate(WIDER)) > 0:
        faults.append(f"is {wider} pixels wider than the screen")
    return faults + [f"does not show {source}" for source in page.evaluate(BROKEN)]


def ask(page: Any, url: str, question: str) -> str:
    """Type a question into the search and return the path of its first result, "" without one."""
    page.goto(url + ("zh/" if ord(question[0]) > 127 else ""))
    page.click("input.md-search__input")
    page.keyboard.type(question)
    page.keyboard.press("End")  # the search reads the field when a key is released
    title = page.locator(".md-search-result__item > a.md-search-result__link").first
    try:
        title.wait_for(timeout=30_000)
    except Exception as error:
        if type(error).__name__ != "TimeoutError":
            raise
        return ""
    page.wait_for_timeout(1000)  # the results are replaced while the question is typed
    return str(title.get_attribute("href")).removeprefix(url).partition("?")[0].partition("#")[0]


def take_screenshots(browser: Any, url: str, folder: Path) -> None:
    """Write screenshots of `SHOTS` at both sizes, light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for scheme in ("light", "dark"):
            page = open_page(browser, size, scheme)
            for path in SHOTS:
                page.goto(url + path)
                name = path.strip("/").replace("/", "-") or "home"
                page.screenshot(path=str(folder / f"{name}_{size}_{scheme}.png"))
            page.context.close()


def check(browser: Any, url: str, site: Path) -> int:
    """Check all pages and questions, print the failures, and return their number."""
    paths = sorted(f.parent.relative_to(site).as_posix() for f in site.rglob("index.html"))
    failures = 0
    for size in SIZES:
        page = open_page(browser, size)
        for path in paths:
            target = "" if path == "." else f"{path}/"
            for fault in find_faults(page, url, target):
                print(f"{size}: {target or 'home'} {fault}")
                failures += 1
        page.context.close()
    page = open_page(browser, "desktop")
    for question, pages in QUESTIONS.items():
        if (first := ask(page, url, question)) not in pages:
            print(f"search: {question!r} finds {first or 'nothing'}, expected {pages[0]}")
            failures += 1
    print(f"{len(paths)} pages at {len(SIZES)} sizes, {len(QUESTIONS)} questions: {failures} fail")
    return failures


def main() -> int:
    """Check the site, and take screenshots if a folder is named."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    parser.add_argument("--chromium", default=found, help="the browser, a program")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the built site")
    parser.add_argument("--screenshots", type=Path, help="folder for screenshots")
    options = parser.parse_args()
    if options.chromium is None:
        parser.error("Chromium is not installed. Install Debian's chromium-headless-shell.")
    if not (options.site / "index.html").is_file():
        parser.error(f"No site was built: --site={options.site}. Run `make docs` first.")
    with serve(options.site) as url, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        if options.screenshots is not None:
            take_screenshots(browser, url, options.screenshots)
        failures = check(browser, url, options.site)
        browser.close()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
