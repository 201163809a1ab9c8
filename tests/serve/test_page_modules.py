"""The page's modules without a browser: Markdown, code and kept conversations, run by Node."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
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
        f"import {{ parseMath }} from '{PAGE}/math.js';"
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


# LaTeX and the MathML that the MathML Core specification gives for it, without its row.
FORMULAS = {
    r"e^{i\pi}+1=0": "<msup><mi>e</mi><mrow><mi>i</mi><mi>π</mi></mrow></msup><mo>+</mo><mn>1</mn>"
    "<mo>=</mo><mn>0</mn>",
    r"\int_0^1 x^2\,dx": "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup><msup><mi>x</mi>"
    '<mn>2</mn></msup><mspace width="0.17em"></mspace><mi>d</mi><mi>x</mi>',
    r"\sum_{n=1}^\infty a_n": "<munderover><mo>∑</mo><mrow><mi>n</mi><mo>=</mo><mn>1</mn></mrow>"
    "<mi>∞</mi></munderover><msub><mi>a</mi><mi>n</mi></msub>",
    r"\frac{1}{2}\frac ab": "<mfrac><mn>1</mn><mn>2</mn></mfrac>"
    "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
    r"\sqrt x\sqrt[3]{x}": "<msqrt><mi>x</mi></msqrt><mroot><mi>x</mi><mn>3</mn></mroot>",
    r"x_12": "<msub><mi>x</mi><mn>1</mn></msub><mn>2</mn>",  # TeX takes one digit
    r"12.5-x": "<mn>12.5</mn><mo>−</mo><mi>x</mi>",
    r"f''^2": "<msup><mi>f</mi><mrow><mo>′′</mo><mn>2</mn></mrow></msup>",
    r"\left(\frac ab\right]": '<mrow><mo fence="true">(</mo><mfrac><mi>a</mi><mi>b</mi></mfrac>'
    '<mo fence="true">]</mo></mrow>',
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": '<mrow><mo fence="true">(</mo><mtable><mtr><mtd><mn>1'
    "</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr>"
    '</mtable><mo fence="true">)</mo></mrow>',
    r"\mathbb{R}^n\mathbf{x}\mathcal L": "<msup><mi>ℝ</mi><mi>n</mi></msup><mi>𝐱</mi><mi>ℒ</mi>",
    r"\lim_{x\to0}\sin x": "<munder><mi>lim</mi><mrow><mi>x</mi><mo>→</mo><mn>0</mn></mrow>"
    "</munder><mi>sin</mi><mi>x</mi>",
    r"\text{if } x>0": "<mtext>if </mtext><mi>x</mi><mo>&gt;</mo><mn>0</mn>",
    r"\hat x\|y\|": '<mover accent="true"><mi>x</mi><mo>^</mo></mover><mo>‖</mo>'
    "<mi>y</mi><mo>‖</mo>",
    r"\binom nk": '<mrow><mo>(</mo><mfrac linethickness="0"><mi>n</mi><mi>k</mi></mfrac><mo>)</mo>'
    "</mrow>",
    "<script>": "<mo>&lt;</mo><mi>s</mi><mi>c</mi><mi>r</mi><mi>i</mi><mi>p</mi><mi>t</mi>"
    "<mo>&gt;</mo>",
}
MATHML = """
const names = (node) => (
  Object.entries(node.attributes).map(([name, value]) => ` ${name}="${value}"`));
const mathml = (node) => (typeof node === "string" ? escape(node)
  : `<${node.tag}${names(node).join("")}>${node.children.map(mathml).join("")}</${node.tag}>`);
"""


def test_formulas_are_mathml() -> None:
    results = run(MATHML + "console.log(JSON.stringify(values[0].map((tex) => "
                "mathml(parseMath(tex)))));", list(FORMULAS))  # fmt: skip
    for (tex, content), result in zip(FORMULAS.items(), results, strict=True):
        assert result == f"<math>{content}</math>", tex


def test_where_formulas_begin_and_end() -> None:
    texts = {
        "a $x$ b": "<p>a <math><mi>x</mi></math> b</p>",
        "it costs $5 and $6": "<p>it costs $5 and $6</p>",
        r"\$5 and $x$": "<p>$5 and <math><mi>x</mi></math></p>",
        r"\(x\), \[y\]": '<p><math><mi>x</mi></math>, <math display="block"><mi>y</mi></math></p>',
        "$$\nx\n$$": '<p><math display="block"><mi>x</mi></math></p>',
        "a\n$$x$$": '<p>a<br><math display="block"><mi>x</mi></math></p>',
        "$$ x": "<p>$$ x</p>",
        "`$x$`": "<p><code>$x$</code></p>",
        "```\n$$x$$\n```": "<pre><code>$$x$$\n</code></pre>",
        r"$\unknown{x}$": r"<p><code>$\unknown{x}$</code></p>",
        "$x*y*z$": "<p><math><mi>x</mi><mo>∗</mo><mi>y</mi><mo>∗</mo><mi>z</mi></math></p>",
    }
    script = MATHML + (
        "const both = (node) => node.isMath ? mathml(node) : typeof node === 'string' ||"
        " !node.children.some((child) => child.isMath) ? render(node)"
        " : `<${node.tag}>${node.children.map(both).join('')}</${node.tag}>`;"
        "console.log(JSON.stringify(values[0].map((text) => "
        "markdown.parseMarkdown(text).map(both).join(''))));"
    )
    assert dict(zip(texts, run(script, list(texts)), strict=True)) == texts


def test_any_text_is_a_formula_of_mathml_or_none() -> None:
    """Random sequences of LaTeX's parts become known elements and attributes, never an error."""
    draw = random.Random(0)
    parts = [*FORMULAS, "{", "}", "^", "_", "&", "\\\\", "\\left", "\\right", "\\begin{cases}", "[",
             "\\end{cases}", "'", "\\sqrt", "\\frac", "\\text{", "\\mathbb", "x", "1", " ", "\\",
             "\\limits", "\\constructor", "__proto__", "<b>",
             "\\href{javascript:x}", "天", "😀"]  # fmt: skip
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 12))) for _ in range(600)]
    texts += ["{" * 10_000, "x^" * 3000, "\\frac" * 2000, "\\begin{matrix}" * 500, "$" * 5000]
    script = (
        "const seen = {tags: new Set(), names: new Set(), count: 0};"
        "const look = (node) => { if (typeof node === 'string') return; seen.tags.add(node.tag);"
        " Object.keys(node.attributes).forEach((name) => seen.names.add(name));"
        " node.children.forEach(look); };"
        "for (const text of values[0]) { const tree = parseMath(text);"
        " if (tree) { seen.count += 1; look(tree); }"
        " markdown.parseMarkdown(`$${text}$ $$${text}`); }"
        "console.log(JSON.stringify([[...seen.tags], [...seen.names], seen.count]));"
    )
    # The texts are an argument of Node, which may have 128 KiB.
    results = [run(script, texts[at : at + 150]) for at in range(0, len(texts), 150)]
    tags, names = (set().union(*(batch[part] for batch in results)) for part in (0, 1))
    count = sum(batch[2] for batch in results)
    elements = "math mi mn mo ms mtext mspace mrow mfrac msqrt mroot msub msup msubsup munder mover"
    elements += " munderover mtable mtr mtd"
    assert tags <= set(elements.split())
    assert names <= {"display", "width", "fence", "accent", "linethickness", "mathvariant"}
    assert count > 60


def test_every_module_of_the_page_is_served(start: Any) -> None:
    with start() as server:
        imported = {"page.js"}
        for file in PAGE.glob("*.js"):
            imported |= set(re.findall(r'from "\./(\w+\.js)"', file.read_text()))
        assert imported == {file.name for file in PAGE.glob("*.js")}
        for name in imported:
            answer = httpx.get(f"{server.url}/page/{name}", timeout=60)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/javascript")
