"""The page's modules without a browser: Markdown, code and kept conversations, run by Node."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path("bmforge/serve/page").resolve()
RENDER = """
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const render = (node) => {
  if (typeof node === "string") return escape(node);
  const inner = node.children.map(render).join("");
  if (node.tag === "br" || node.tag === "hr") return `<${node.tag}>`;
  if (node.tag === "pre") return `<pre><code>${inner}</code></pre>`;
  if (node.tag === "a") return `<a href="${escape(node.href)}">${inner}</a>`;
  return `<${node.tag}${node.start ? ` start="${node.start}"` : ""}>${inner}</${node.tag}>`;
};
"""


def run(script: str, *values: Any) -> Any:
    """The JSON that a module script prints; its `values` are JSON too."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    head = (
        f"import * as markdown from '{PAGE}/markdown.js'; import * as store from '{PAGE}/store.js';"
        f"import {{ highlight }} from '{PAGE}/highlight.js';"
        f"const values = JSON.parse(process.argv[1]);"
    )
    command = [node, "--no-warnings", "--input-type=module", "-e", head + RENDER + script]
    found = subprocess.run(
        [*command, json.dumps(values)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


TEXTS = [
    "plain", "two\nlines", "a\n\nb", "# Head\ntext", "**bold** and *slanted* `code`",
    "- a\n- b", "1. a\n2. b", "3. c\n4. d", "- a\n  - b\n  - c\n- d", "> quote\n> more",
    "| a | b |\n|---|---|\n| 1 | 2 |", "```python\nx = 1\n```", "~~~\na\n~~~", "***", "~~gone~~",
    "[link](https://example.org)", "2 * 3 * 4", "snake_case_name", "a < b & c", "<b>x</b>",
    "<script>alert(1)</script>", r"\*no\*", "```\nunclosed", "`` a`b ``", "天气 **很好**",
]  # fmt: skip


def test_markdown_is_that_of_another_parser() -> None:
    """As markdown-it reads it, with single line breaks kept and HTML as text."""
    from markdown_it import MarkdownIt

    other = MarkdownIt("js-default", {"html": False, "breaks": True, "linkify": False})
    found = run("console.log(JSON.stringify(values[0].map((text) => "
                "markdown.parseMarkdown(text).map(render).join(''))));", TEXTS)  # fmt: skip
    for text, ours in zip(TEXTS, found, strict=True):
        assert normalized(ours) == normalized(other.render(text)), text


def normalized(text: str) -> str:
    """HTML without line breaks between elements, classes and spellings of the same element."""
    for old, new in (
        ("<br />", "<br>"), ("<hr />", "<hr>"), ("<s>", "<del>"), ("</s>", "</del>"),
        (' class="language-python"', ""),
    ):  # fmt: skip
        text = text.replace(old, new)
    lines = "".join(line.strip() for line in text.split("\n"))
    return html.unescape(lines)


def test_no_address_runs_a_script() -> None:
    texts = ["[a](javascript:alert(1))", "[a](data:text/html,x)", "![a](javascript:x)", "[a](//x)"]
    found = run("console.log(JSON.stringify(values[0].map(markdown.parseMarkdown)));", texts)
    assert '"a"' not in [node["tag"] for nodes in found for node in nodes]
    assert "href" not in json.dumps(found)


def test_code_is_never_changed() -> None:
    code = "def f(x):  # twice\n    return \"a'b\" + 'c' * 2  /* x */ <b>\n"
    languages = ["python", "js", "bash", "sql", "json", "", "unknown", "C++"]
    found = run("console.log(JSON.stringify(values[1].map((l) => highlight(values[0], l))));",
                code, languages)  # fmt: skip
    assert all("".join(text for _, text in parts) == code for parts in found)
    assert ["keyword", "def"] in found[0]
    assert ["comment", "# twice"] in found[0]


def test_the_oldest_turns_are_left_out() -> None:
    script = """
    const one = store.newConversation({ system: "s" });
    for (const n of [0, 1, 2]) one.messages.push({ role: "user", content: `q${n}` },
      { role: "assistant", content: `a${n}` });
    one.messages.push({ role: "user", content: "q3" });
    const sent = [];
    const read = () => store.sentMessages(one).map((m) => m.content).join(" ");
    do sent.push(read()); while (store.dropTurn(one));
    console.log(JSON.stringify([sent, one.messages.length]));
    """
    assert run(script) == [
        ["s q0 a0 q1 a1 q2 a2 q3", "s q1 a1 q2 a2 q3", "s q2 a2 q3", "s q3"],
        7,
    ]


def test_conversations_there_and_back() -> None:
    script = """
    const kept = new Map();
    const storage = { getItem: (k) => kept.get(k) ?? null, setItem: (k, v) => kept.set(k, v) };
    const one = { ...store.newConversation({ temperature: 0.5 }),
      messages: [{ role: "user", content: "天气" },
        { role: "assistant", content: "好", thoughts: "t" }] };
    store.save(storage, [one, store.newConversation()]);
    const read = store.load(storage);
    const same = JSON.stringify(read) === JSON.stringify([one]);
    const later = { ...one, time: one.time + 1, title: "later" };
    const merged = store.merge([one], [later, { ...one, time: 0 }]);
    const errors = values[0].map((text) => {
      try { store.parseConversations(text); return ""; } catch (error) { return error.message; }
    });
    kept.set("bmforge.conversations", "{");
    store.load(storage);
    console.log(JSON.stringify([same, merged.map((o) => o.title), errors,
      store.search(read, "天").length, store.search(read, "x").length,
      kept.get("bmforge.conversations.unreadable")]));
    """
    wrong = ["{}", "x", '[{"messages": 1}]', '[{"messages": [{"role": "system", "content": ""}]}]']
    same, titles, errors, hits, misses, saved = run(script, wrong)
    assert same is True
    assert titles == ["later"]
    assert all(errors)
    assert (hits, misses, saved) == (1, 0, "{")
