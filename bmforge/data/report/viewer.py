"""HTML viewer of sample documents, kept and dropped, with a search field and a list of the rules.

All texts come from the corpus, so they are escaped here, and the page's script inserts them only as
text. Without scripts the page shows all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["VIEWER_SCRIPT", "VIEWER_STYLE", "clean_text", "draw_viewer"]

_MOST_CHARACTERS = 1000
_KEPT = "kept · 保留"


def draw_viewer(
    kept: Sequence[str], dropped: Sequence[Mapping[str, Any]], counts: Mapping[str, int]
) -> str:
    """Return the sample viewer as HTML.

    Args:
        kept: texts of kept documents.
        dropped: entries of ``dropped.jsonl``.
        counts: dict from rule to the number of documents that it dropped; "kept" is the number of
            kept documents.
    """
    samples = [_sample(_KEPT, "", text) for text in kept]
    samples += [
        _sample(entry["rule"], _origin(entry), str(entry.get("text") or entry["excerpt"]))
        for entry in dropped
    ]
    shown = [_KEPT] * bool(kept) + sorted({str(entry["rule"]) for entry in dropped})
    options = "".join(
        f'<option value="{escape(name)}">{escape(name)} ({counts.get(_plain(name), 0):,})</option>'
        for name in map(clean_text, shown)
    )
    return (
        '<section id="viewer"><h2>Samples · 样本</h2><form role="search">'
        f'<label>Rule · 规则 <select id="rule"><option value="">all · 全部</option>{options}'
        '</select></label><label>Search · 搜索 <input id="query" type="search"></label>'
        f'<output id="shown">{len(samples)}</output></form>{"".join(samples)}</section>'
    )


def _plain(name: str) -> str:
    return "kept" if name == _KEPT else name


def _sample(rule: str, origin: str, text: str) -> str:
    """Return the HTML of one sample; the browser chooses its writing direction."""
    rule, origin = clean_text(rule), clean_text(origin)
    shown = clean_text(text[:_MOST_CHARACTERS]) + (" …" if len(text) > _MOST_CHARACTERS else "")
    return (
        f'<article data-rule="{escape(rule)}"><small><b>{escape(rule)}</b>{escape(origin)}</small>'
        f'<p dir="auto">{escape(shown)}</p></article>'
    )


def _origin(entry: Mapping[str, Any]) -> str:
    """Describe the measured value and limit of a rule, and the location of the document."""
    value, bound = entry["value"], entry["bound"]
    shown = ""
    if value is not None:
        shown = f": {value:.4g}" if isinstance(value, float) else f": {value}"
        shown += f" ({bound})" if bound is not None else ""
    return f"{shown} · {entry['source']}:{entry['place']}"


def clean_text(text: str) -> str:
    """Replace control characters, surrogates and bidirectional overrides in a text.

    HTML cannot represent the first two, and an override would reorder the text that follows.
    """
    return "".join(_visible(text))


def _visible(text: str) -> Iterator[str]:
    for character in text:
        code = ord(character)
        is_control = (code < 32 and character not in "\t\n") or 0x7F <= code < 0xA0
        is_override = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
        yield (
            "\N{REPLACEMENT CHARACTER}"
            if (is_control or is_override or 0xD800 <= code < 0xE000)
            else character
        )


VIEWER_STYLE = """
#viewer form{display:flex;flex-wrap:wrap;gap:16px;align-items:center;margin-bottom:12px}
#viewer input,#viewer select{font:inherit;padding:4px 8px;max-width:100%}
#viewer article{margin:0 0 10px;padding:6px 12px;border-left:3px solid var(--c3)}
#viewer article:not([data-rule^="kept"]){border-color:var(--bad)}
#viewer small{opacity:.75;overflow-wrap:anywhere}
#viewer p{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow-y:auto}
"""

# Shows the samples of the chosen rule that contain the search text, in any case.
VIEWER_SCRIPT = """
const rule = document.getElementById("rule"), query = document.getElementById("query");
const shown = document.getElementById("shown");
const samples = [...document.querySelectorAll("#viewer article")];
const texts = samples.map((sample) => sample.textContent.toLowerCase());
function update() {
  const words = query.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  samples.forEach((sample, index) => {
    const isRule = rule.value === "" || sample.getAttribute("data-rule") === rule.value;
    sample.hidden = !(isRule && words.every((word) => texts[index].includes(word)));
    count += sample.hidden ? 0 : 1;
  });
  shown.textContent = String(count);
}
rule.addEventListener("change", update);
query.addEventListener("input", update);
const form = document.querySelector("#viewer form");
form.addEventListener("submit", (event) => event.preventDefault());
"""
