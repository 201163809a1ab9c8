"""The page in a browser: conversations, settings, attachments, and the layout of the screen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_visit import Visit, say
from scripted_engine import ScriptedEngine
from test_serve_sockets import until

from bmforge.infer import Engine

pytestmark = pytest.mark.long


def test_conversations_are_branched_searched_and_imported(
    browser: Any, start: Any, engine: Engine, model_directory: Path, tmp_path: Path
) -> None:
    scripted: Any = ScriptedEngine(engine, "about bees", size=4)
    with start(other=scripted, place=model_directory) as server:
        visit = Visit(browser, server)
        page = visit.page
        say(page, "one")
        say(page, "two")
        page.locator("li.assistant >> text=Branch").first.click()
        assert page.locator("li .words").all_text_contents() == ["one", "about bees"]
        scripted.text = "about ants"
        say(page, "three")
        assert page.locator(".saved").count() == 2  # the first conversation is not changed
        page.fill("#search", "ANTS")
        assert page.locator(".saved").count() == 1
        page.fill("#search", "bees")
        assert page.locator(".saved").count() == 2
        page.fill("#search", "")
        with page.expect_download() as download:
            page.click("#export")
        exported = tmp_path / "conversations.json"
        exported.write_bytes(Path(download.value.path()).read_bytes())
        other = Visit(browser, server).page
        assert other.locator(".saved").count() == 0
        other.set_input_files("#import-file", str(exported))
        other.locator(".saved >> nth=1").wait_for()
        other.fill("#search", "ants")
        other.locator(".saved .title").click()
        texts = ["one", "about bees", "three", "about ants"]
        assert other.locator("li .words").all_text_contents() == texts
        exported.write_text("[{}]")
        other.set_input_files("#import-file", str(exported))
        other.locator("#problem").wait_for()
        assert "no messages" in other.text_content("#problem")
        assert other.locator("li").count() == 4
        assert not visit.wrong


def test_tabs_keep_each_others_conversations(
    browser: Any, start: Any, engine: Engine, model_directory: Path
) -> None:
    scripted: Any = ScriptedEngine(engine, "yes", size=4)
    with start(other=scripted, place=model_directory) as server:
        context = browser.new_context(locale="en-GB")
        first, second = context.new_page(), context.new_page()
        for page in (first, second):
            page.goto(server.url)
            page.locator("#model:not(:empty)").wait_for()
        for number, page in enumerate([first, second, first]):
            say(page, f"message {number}")
        second.reload()
        for page in (first, second):
            page.locator(".saved >> nth=1").wait_for()
            page.locator(".saved .title >> text=message 0").click()
            texts = ["message 0", "yes", "message 2", "yes"]
            assert page.locator("li .words").all_text_contents() == texts
            page.locator(".saved .title >> text=message 1").click()
            assert page.locator("li .words").all_text_contents() == ["message 1", "yes"]


def test_settings_adapters_and_attachments(
    browser: Any, start: Any, engine: Engine, model_directory: Path, tmp_path: Path
) -> None:
    scripted: Any = ScriptedEngine(engine, "```python\nprint(1)\n```", size=4)
    with start(other=scripted, place=model_directory, deltas={"ann": "ann"}) as server:
        visit = Visit(browser, server)
        page = visit.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.fill("#set-system", "Be short.")
        page.select_option("#set-model", "ann")
        notes = tmp_path / "notes.md"
        notes.write_text("# 天气\n```\ncode\n```\n")
        page.set_input_files("#attach-file", str(notes))
        assert until(lambda: "notes.md" in page.input_value("#chat-text"))
        page.press("#chat-text", "Enter")
        page.locator("li.assistant .actions").wait_for()
        body = visit.bodies[-1]
        assert body["model"] == "ann"
        assert scripted.requests[-1].delta == "ann"
        assert body["messages"][0] == {"role": "system", "content": "Be short."}
        fence = "~" * 4  # the file has the usual fence itself
        text = f"notes.md:\n{fence}\n# 天气\n```\ncode\n```\n{fence}"
        assert body["messages"][1]["content"].strip() == text
        page.locator(".code-head button").click()
        assert page.evaluate("navigator.clipboard.readText()").strip() == "print(1)"
        page.locator("li.user .actions >> text=Copy").click()
        assert page.evaluate("navigator.clipboard.readText()").strip() == text
        page.click("#chat-clear")
        page.fill("#set-system", "")
        page.select_option("#set-model", server.serving.name)
        say(page, "hello")
        assert [message["role"] for message in visit.bodies[-1]["messages"]] == ["user"]
        page.locator(".saved .title").last.click()
        assert page.input_value("#set-system") == "Be short."
        assert page.input_value("#set-model") == "ann"
        assert not visit.wrong


@pytest.mark.parametrize("width", [1000, 390])
def test_scrolling_and_names_of_controls(browser: Any, start: Any, width: int) -> None:
    """The view follows an answer only from its end; a screen reader has a name of every control."""
    with start() as server:
        visit = Visit(browser, server, viewport={"width": width, "height": 520})
        page = visit.page
        visit.body = {"logit_bias": {"70": 100}, "temperature": 0, "max_tokens": 900}
        page.keyboard.type("go")  # the message has the focus
        page.keyboard.press("Enter")
        assert until(lambda: page.evaluate("said.scrollHeight > said.clientHeight + 50"))
        page.evaluate("said.scrollTop = 0")
        words = page.locator("li.assistant .words")
        before = len(words.text_content())
        assert until(lambda: len(words.text_content()) > before + 30)
        assert page.evaluate("said.scrollTop") == 0
        page.evaluate("said.scrollTop = said.scrollHeight")
        assert until(lambda: len(words.text_content()) > before + 300)
        assert page.evaluate("said.scrollHeight - said.scrollTop - said.clientHeight") < 40
        page.locator("#chat-stop").wait_for(state="hidden")
        unnamed = re.findall(
            r"- (?:button|textbox|searchbox|combobox|spinbutton|tab)\s*(?::.*)?$",
            page.locator("body").aria_snapshot(),
            re.MULTILINE,
        )
        assert not unnamed
        assert page.locator("#said").get_attribute("aria-live") == "polite"
        assert not visit.wrong


WIDE = {
    "code": "```python\n" + "value = " + "1 + " * 60 + "1\n```",
    "table": "|" + " column |" * 30 + "\n|" + "---|" * 30 + "\n|" + " value |" * 30,
    "word": "a" * 300,
    "formula": "$$" + "+".join(f"x_{{{number}}}^2" for number in range(60)) + "$$",
    "list": "- " + "> " * 5 + "word " * 50,
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(
    browser: Any, start: Any, engine: Engine, model_directory: Path, scheme: str
) -> None:
    """Every wide part of an answer scrolls on its own, on phones and on desktops."""
    scripted: Any = ScriptedEngine(engine, "", size=100)
    with start(other=scripted, place=model_directory) as server:
        for width in (320, 390, 768, 1280):
            size = {"width": width, "height": 800}
            visit = Visit(browser, server, viewport=size, color_scheme=scheme)
            page = visit.page
            for name, text in WIDE.items():
                scripted.text = text
                page.click("#chat-clear")
                say(page, "go")
                assert page.locator("li.assistant .actions").is_visible()
                for area in ("html", "#said"):
                    wide = page.locator(area).evaluate("e => e.scrollWidth - e.clientWidth")
                    assert wide <= 0, (name, width, area, wide)
            colors = page.locator("body").evaluate(
                "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
                ".map((text) => text.match(/\\d+/g).slice(0, 3).map(Number))"
            )
            brightness = [sum(color) for color in colors]
            assert (brightness[0] < brightness[1]) == (scheme == "light")
            assert abs(brightness[0] - brightness[1]) > 450
            assert not visit.wrong
            page.close()
