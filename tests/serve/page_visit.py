"""A visit of the page in Chromium, for the tests of the page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SHOTS = os.environ.get("BMFORGE_PAGE_SHOTS")  # a folder, for whoever wants to look


class Visit:
    """A page of a server, with all that it asked for and all that went wrong."""

    def __init__(self, browser: Any, server: Any, locale: str = "en-GB", **more: Any) -> None:
        self.page = browser.new_page(locale=locale, **more)
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.bodies: list[dict[str, Any]] = []  # what the page asked
        self.body: dict[str, Any] = {}  # what is added to what the page asks
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._listen)
        self.page.on("dialog", lambda dialog: self.wrong.append("a dialog") or dialog.dismiss())
        self.page.route("**/v1/**", self._add)
        self.page.goto(server.url)
        self.page.locator("#model:not(:empty)").wait_for()

    def _listen(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.wrong.append(said.text)

    def _add(self, route: Any) -> None:
        body = json.loads(route.request.post_data)
        self.bodies.append(body)
        route.continue_(post_data=json.dumps({**body, **self.body}))

    def shoot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def say(page: Any, text: str) -> None:
    page.fill("#chat-text", text)
    page.press("#chat-text", "Enter")
    page.locator("#chat-stop").wait_for(state="hidden")
