"""The page in a browser: a person writes, reads, stops, and fills a document."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_visit import Visit, say
from scripted_engine import ScriptedEngine
from test_serve_sockets import is_idle, until

from bmforge.infer import Engine
from bmforge.models import CPMBee, CPMBeeConfig
from bmforge.tokenizers import CPMBeeTokenizer

pytestmark = pytest.mark.long
HOSTILE = "今天天气很好 <img src=x onerror=alert(1)> <b>不</b>\n```python\nprint('好')\n```\n完"


def test_a_chat(browser: Any, start: Any, engine: Engine) -> None:
    """What the model writes is text, whatever it looks like; nothing comes from elsewhere."""
    with start() as server:
        visit = Visit(browser, server)
        page = visit.page
        visit.body = {"structured_outputs": {"choice": [HOSTILE]}}
        page.fill("#chat-text", "天气怎么样？")
        page.press("#chat-text", "Enter")
        words = page.locator("li.assistant .words").last
        words.locator("pre").wait_for()
        page.locator("#chat-stop").wait_for(state="hidden")
        first, _, rest = HOSTILE.partition("\n")
        assert words.locator("p").all_text_contents() == [first, "完"]
        assert words.locator("pre").text_content() == rest.split("\n")[1] + "\n"
        assert page.locator("li img, li b, li script").count() == 0
        assert page.locator("li.user .words").text_content() == "天气怎么样？"
        visit.shoot("chat")
        # The second answer is stopped, and ends in the engine too.
        visit.body = {"logit_bias": {"70": 100}, "temperature": 0, "max_tokens": 800}
        page.fill("#chat-text", "more")
        stopped = threading.Event()  # the answer does not end before
        waiting = threading.Thread(target=engine.call, args=(lambda: stopped.wait(60),))
        waiting.start()
        page.click("#chat-send")
        page.click("#chat-stop")
        stopped.set()
        waiting.join()
        assert until(lambda: is_idle(engine))
        page.locator("#chat-stop").wait_for(state="hidden")
        page.click("#chat-clear")
        assert page.locator("li").count() == 0
        assert not visit.wrong
        assert {url.partition("//")[2].partition("/")[0] for url in visit.asked} == {
            server.url.partition("//")[2]
        }
        assert page.evaluate(
            "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; }"
            " catch (error) { return true; } })()"
        )


def test_both_languages_and_what_is_refused(browser: Any, start: Any) -> None:
    with start() as server:
        visit = Visit(browser, server, "zh-CN", viewport={"width": 1200, "height": 800})
        page = visit.page
        assert page.locator("#chat-send").text_content() == "发送"
        page.fill("#set-temperature", "0.5")
        page.fill("#set-max_tokens", "12")
        visit.shoot("chinese")
        visit.body = {"logit_bias": {"70": 100}}  # no end is drawn before
        page.click("#language")
        assert page.locator("#chat-send").text_content() == "Send"
        assert page.input_value("#set-temperature") == "0.5"
        page.click("#tabs button >> nth=1")
        page.fill("#text-text", "Once upon a time")
        page.click("#text-send")
        page.locator("#took:not(:empty)").wait_for()
        assert page.input_value("#text-text").startswith("Once upon a time")
        assert "12 tokens in" in page.text_content("#took")
        assert page.locator("#parts tr").count() >= 5
        visit.shoot("text")
        page.fill("#set-temperature", "9")
        page.click("#text-send")
        page.locator("#problem").wait_for()
        assert "temperature" in page.text_content("#problem")
        assert not [wrong for wrong in visit.wrong if "400" not in wrong]


def test_conversations_are_kept_and_changed(
    browser: Any, start: Any, engine: Engine, model_directory: Path, tmp_path: Path
) -> None:
    scripted: Any = ScriptedEngine(engine, "<think>\nwell\n</think>\n\nfirst", size=4)
    thinking = tmp_path / "thinking"
    shutil.copytree(model_directory, thinking)
    settings = thinking / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("{%- if tools", "{#<think>#}{%- if tools"))
    with start(other=scripted, place=thinking) as server:
        visit = Visit(browser, server)
        page = visit.page
        page.fill("#set-temperature", "0.5")
        say(page, "one")
        assert page.locator("li.assistant .words").text_content() == "first"
        assert page.locator(".thoughts").last.get_attribute("open") is None
        assert page.locator(".thoughts div").last.text_content() == "well"
        scripted.text = "second"
        say(page, "two")
        page.reload()
        page.locator("#model:not(:empty)").wait_for()
        assert page.locator("li").count() == 4
        assert page.input_value("#set-temperature") == "0.5"
        page.click("#chat-clear")
        assert page.locator("li").count() == 0
        page.locator(".saved .title").click()
        assert page.locator("li").count() == 4
        assert page.input_value("#set-temperature") == "0.5"
        scripted.text = "third"
        page.locator("li.assistant >> text=Regenerate").last.click()
        page.locator("li.assistant .words >> text=third").wait_for()
        assert page.locator("li").count() == 4
        scripted.text = " more"
        page.locator("li.assistant >> text=Continue").last.click()
        page.locator("li.assistant .words >> text=third more").wait_for()
        assert visit.bodies[-1]["continue_final_message"] is True
        page.locator("li.user >> text=Edit").first.click()
        assert page.input_value("#chat-text") == "one"
        say(page, "another")
        assert page.locator(".saved").count() == 2  # the former one is still there
        with page.expect_download() as download:
            page.click("#export")
        kept = json.loads(Path(download.value.path()).read_text())
        assert sorted(len(one["messages"]) for one in kept) == [2, 4]
        visit.shoot("conversations")
        assert not visit.wrong


def test_a_full_context_and_a_refused_message(
    browser: Any, start: Any, engine: Engine, model_directory: Path
) -> None:
    scripted: Any = ScriptedEngine(engine, "x" * 200, size=50)
    with start(other=scripted, place=model_directory) as server:
        visit = Visit(browser, server, viewport={"width": 375, "height": 740})
        page = visit.page
        for number in range(6):  # of 1,024 tokens, with about 260 a turn
            say(page, f"message {number}")
            assert page.locator("#problem").is_hidden()
        assert "no longer sent" in page.locator(".note").text_content()
        assert len(visit.bodies[-1]["messages"]) < 11
        assert visit.bodies[-1]["messages"][-1]["content"] == "message 5"
        count = page.locator("li").count()
        say(page, "a" * 1500)
        assert page.locator("#problem").is_visible()
        assert page.locator("#problem").bounding_box()["y"] < 740
        assert page.input_value("#chat-text") == "a" * 1500
        assert page.locator("li").count() == count
        page.fill("#chat-text", "ni hao")
        page.evaluate(
            "document.getElementById('chat-text').dispatchEvent(new KeyboardEvent('keydown',"
            "{key: 'Enter', keyCode: 229, bubbles: true, cancelable: true}))"
        )
        assert page.input_value("#chat-text") == "ni hao"
        visit.shoot("phone")


def test_a_page_behind_a_key(browser: Any, start: Any) -> None:
    """The browser asks for the key, and sends it with everything."""
    key = "the-key-of-the-page"
    with start(keys=key) as server:
        assert browser.new_page().goto(server.url).status == 401
        credentials = {"username": "me", "password": key}
        context = browser.new_context(http_credentials=credentials)
        page = context.new_page()
        assert page.goto(server.url).status == 200
        page.locator("#model:not(:empty)").wait_for()
        page.fill("#set-max_tokens", "5")
        page.fill("#chat-text", "hello")
        page.click("#chat-send")
        page.locator("#took:not(:empty)").wait_for()
        assert page.locator("#problem").is_hidden()


@pytest.fixture(scope="module")
def bee() -> Iterator[Engine]:
    """A CPM-Bee with random weights over letters."""
    head = [
        "<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<root>", "<ans>",
        "<option>",
    ]  # fmt: skip
    tokenizer = CPMBeeTokenizer([*head, *"abcdefghijklmnopqrstuvwxyz0123456789?()-._"])
    config = CPMBeeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2,
        head_dim=16, num_buckets=16, num_relations=64,
    )  # fmt: skip
    with Engine(CPMBee.from_config(config, seed=2), tokenizer=tokenizer) as engine:
        yield engine


def test_a_document(browser: Any, start: Any, bee: Engine) -> None:
    with start(other=bee) as server:
        visit = Visit(browser, server)
        page = visit.page
        assert page.locator("#tabs button").count() == 1
        page.fill("#set-max_tokens", "5")
        page.fill("#documents-text", '{"input": "what is a list?", "<ans>": ""}')
        page.click("#documents-send")
        page.locator("#filled pre").wait_for()
        found = json.loads(page.text_content("#filled pre"))
        assert found["input"] == "what is a list?"
        assert isinstance(found["<ans>"], str)
        visit.shoot("documents")
        page.fill("#documents-text", "{")
        page.click("#documents-send")
        assert "not valid JSON" in page.text_content("#problem")
        assert not visit.wrong
