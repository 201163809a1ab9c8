"""A model's tree as one page: a click on a row marks a target and writes the line for it."""

from __future__ import annotations

import html
import json

from bmforge.tune.delta.tree import Row, short_count, walk_rows

__all__ = ["tree_page"]

# Types whose parts stand beside modules that a user names, in the order of the page's list.
_TYPES = ("Lora", "Adapter", "LowRankAdapter", "Compacter", "BitFit", "IA3")
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --mark: #a3c8ff66; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; }
#say { background: Canvas; border-bottom: 1px solid var(--line); padding: .6rem 0; position: sticky;
  top: 0; }
pre { background: #8881; margin: .4rem 0; padding: .5rem; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; }
td { border-bottom: 1px solid var(--line); padding: .1rem .5rem; vertical-align: top; }
td:last-child { text-align: right; white-space: nowrap; }
tr[data-targets] { cursor: pointer; }
tr[data-targets]:hover, tr:focus { background: #8882; }
tr.marked, tr.marked:hover { background: var(--mark); }
.kind { color: #2a8a3e; } .trained { color: #1f6feb; } .frozen { color: #777; }
.delta { color: #b537c4; }
code { font-family: ui-monospace, monospace; }
"""
_SCRIPT = """
const type = document.getElementById("type"), line = document.getElementById("line");
const rows = [...document.querySelectorAll("tr[data-targets]")];
function write() {
  const marked = rows.filter(row => row.classList.contains("marked"));
  const targets = marked.flatMap(row => JSON.parse(row.dataset.targets));
  const listed = targets.map(target => JSON.stringify(target)).join(", ");
  const name = type.value;
  line.textContent = `from bmforge.tune.delta import ${name}\\n\\ndelta = ${name}(model` +
    (targets.length ? `, targets=[${listed}])` : ")  # where it usually stands");
}
function toggle(row) {
  row.classList.toggle("marked");
  row.setAttribute("aria-pressed", row.classList.contains("marked"));
  write();
}
for (const row of rows) {
  row.addEventListener("click", () => toggle(row));
  row.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(row); }
  });
}
type.addEventListener("change", write);
document.getElementById("copy").addEventListener("click",
  () => navigator.clipboard.writeText(line.textContent));
write();
"""


def tree_page(row: Row, title: str) -> str:
    """Return a page that needs nothing but itself.

    Args:
        row: of the whole model.
        title: what is shown.
    """
    counts = row.counts
    said = f"{counts.total:,} parameters, {counts.trained:,} of them trained"
    if counts.delta:
        said += f"; {counts.delta:,} are deltas'"
    types = "".join(f"<option>{name}</option>" for name in _TYPES)
    body = "".join(_line(depth, one) for depth, one in walk_rows(row))
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{name}</h1><p>{html.escape(said)}. Click on rows: the line below puts a delta beside "
        'what they name. <span class="trained">trained</span> <span class="frozen">frozen</span> '
        f'<span class="delta">delta</span></p><div id="say"><select id="type">{types}</select> '
        '<button id="copy">copy</button><pre><code id="line"></code></pre></div>'
        f"<table><tbody>{body}</tbody></table><script>{_SCRIPT}</script></body></html>\n"
    )


def _line(depth: int, row: Row) -> str:
    tensors = " ".join(
        f'<span class="{tensor.whose}"><code>{html.escape(tensor.name)} '
        f"({', '.join(map(str, tensor.shape))}{', again' if tensor.is_again else ''})</code></span>"
        for tensor in row.tensors
    )
    attributes = ""
    if row.targets:
        targets = html.escape(json.dumps(list(row.targets)))
        attributes = f' data-targets="{targets}" tabindex="0" role="button" aria-pressed="false"'
    trained = ""
    if 0 < row.counts.trained < row.counts.total:
        whose = "delta" if row.counts.trained <= row.counts.delta else "trained"
        trained = f'<span class="{whose}">{short_count(row.counts.trained)} of </span>'
    return (
        f'<tr{attributes}><td style="padding-left:{0.5 + 1.2 * depth:.1f}rem">'
        f'<b><code>{html.escape(row.name)}</code></b> <span class="kind">{html.escape(row.kind)}'
        f"</span> {tensors}</td><td>{trained}{short_count(row.counts.total)}</td></tr>\n"
    )
