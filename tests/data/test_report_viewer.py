"""The sample viewer of the corpus report: nothing of a text is markup, and the search finds it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import html

from bmforge.data import PrepareConfig, prepare
from bmforge.data.report import write_corpus_report
from bmforge.data.report.viewer import VIEWER_SCRIPT, clean_text, draw_viewer
from bmforge.html_page import write_page

HOSTILE = (
    *("<script>alert(1)</script>", "</p></article><img src=x onerror=alert(1)>", "<!--", "-->"),
    *("<style>*{display:none}</style>", '" onmouseover="alert(1)', "' autofocus onfocus=x '"),
    *("&lt;b&gt;", "&#60;script&#62;", "\x00", "\x1b[31m", "\u202e txt", "\ud800", "\ufffe"),
    *(
        "</section></main>",
        "<base href=//x>",
        "<svg/onload=alert(1)>",
        "]]>",
        "<![CDATA[",
        "`${x}`",
    ),
)
TEXTS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12)), max_size=4).map("".join)
ENTRIES = st.fixed_dictionaries(
    {
        "rule": TEXTS,
        "value": st.one_of(st.none(), st.floats(allow_nan=False), TEXTS),
        "bound": st.one_of(st.none(), TEXTS),
        "excerpt": TEXTS,
        "source": TEXTS,
        "place": TEXTS,
    }
)
TAGS = {
    *("section", "h2", "form", "label", "select", "option", "input", "output"),
    *("article", "small", "b", "p"),
}
ATTRIBUTES = {"id", "role", "value", "type", "data-rule", "dir"}


@settings(max_examples=80, deadline=None)
@given(kept=st.lists(TEXTS, max_size=3), dropped=st.lists(ENTRIES, max_size=4))
def test_texts_stay_texts(kept: list[str], dropped: list[dict[str, Any]]) -> None:
    """Another parser finds only the viewer's own elements, and every text as it is."""
    drawn = draw_viewer(kept, dropped, {})
    drawn.encode()  # no surrogate is left
    page = html.fromstring(f"<html><body><main>{drawn}</main></body></html>")
    elements = list(page.find(".//main").iterdescendants())
    assert {str(element.tag) for element in elements} <= TAGS
    assert {name for element in elements for name in element.attrib} <= ATTRIBUTES
    shown = [article.find("p").text or "" for article in page.iter("article")]
    texts = [*kept, *(entry["excerpt"] for entry in dropped)]
    assert shown == [clean_text(text) for text in texts]
    rules = [article.get("data-rule") for article in page.iter("article")]
    assert rules[len(kept) :] == [clean_text(entry["rule"]) for entry in dropped]


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_cleaning_replaces_what_has_no_form(text: str) -> None:
    cleaned = clean_text(text)
    assert len(cleaned) == len(text)
    for before, after in zip(text, cleaned, strict=True):
        kind = unicodedata.category(before)
        bidi = unicodedata.bidirectional(before)
        if before in "\t\n" or (
            kind not in ("Cc", "Cs")
            and bidi not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        ):
            assert after == before
        else:
            assert after == "\ufffd"


def test_the_page_runs_its_own_script_alone(tmp_path: Path) -> None:
    page = write_page(tmp_path / "a.html", "a", "report", ["x"], script="run()").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    script = re.search("<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert "script-src 'none'" in write_page(tmp_path / "b.html", "a", "report", ["x"]).read_text()


DOM = """
const given = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const element = () => ({ value: "", textContent: "", listeners: {},
  addEventListener(name, run) { this.listeners[name] = run; } });
const parts = { rule: element(), query: element(), shown: element() }, form = element();
const articles = given.samples.map(([rule, text]) => ({
  textContent: text, hidden: false, getAttribute: () => rule }));
globalThis.document = { getElementById: (id) => parts[id], querySelector: () => form,
  querySelectorAll: () => articles };
(0, eval)(given.script);
const answers = given.questions.map(([rule, query]) => {
  parts.rule.value = rule; parts.rule.listeners.change();
  parts.query.value = query; parts.query.listeners.input();
  return [articles.map((article) => !article.hidden), parts.shown.textContent];
});
console.log(JSON.stringify(answers));
"""


def test_rule_and_search_choose_the_samples() -> None:
    """The script, run by node, against a plain filter."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    samples = [
        *(("kept", "Die Straße ist lang"), ("kept", "北京是中国的首都"), ("c4.x", "STRASSE <b>")),
        *(("c4.x", "a.*b [x"), ("gopher", "A long sentence"), ("gopher", "")),
    ]
    rules, words = ["", "kept", "c4.x", "none"], ["", "stra", "LONG", "北京", ".*", "a long", "<B>"]
    questions = [(rule, word) for rule in rules for word in words]
    given = {"script": VIEWER_SCRIPT, "samples": samples, "questions": questions}
    ran = subprocess.run(
        ["node", "-e", DOM], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    for (rule, query), (shown, count) in zip(questions, json.loads(ran.stdout), strict=True):
        want = [
            rule in ("", name) and all(word in text.lower() for word in query.lower().split())
            for name, text in samples
        ]
        assert shown == want
        assert count == str(sum(want))


def test_a_report_shows_kept_and_dropped_documents_by_rule(tmp_path: Path) -> None:
    lines = [f"<script>x{n}</script> This is a sentence of document {n}. " * 9 for n in range(12)]
    lines += [lines[0], lines[1], "lorem ipsum dolor sit amet " * 30]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepare([str(source)], tmp_path / "out", PrepareConfig(vocab_size=300, near_duplicates=0.9))
    text = write_corpus_report(tmp_path / "out").read_text("utf-8")
    page = html.fromstring(text)
    assert len(list(page.iter("script"))) == 1
    assert "<script>x" not in text
    rules = [article.get("data-rule") for article in page.iter("article")]
    assert "duplicate" in rules
    assert rules[0].startswith("kept")
    options = [option.get("value") for option in page.iter("option")]
    assert set(rules) == set(options) - {""}
    table = next(t for t in page.iter("table") if "stage" in t.text_content())
    rows = [[cell.text_content() for cell in row] for row in table.iter("tr")][1:]
    left = [int(row[1].replace(",", "")) for row in rows]
    gone = [int(row[2].replace(",", "")) for row in rows]
    assert left[0] == len(lines)
    assert [before - now for before, now in pairwise(left)] == gone[1:]
