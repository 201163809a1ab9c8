"""Renders a model's tree as an HTML page; clicking rows shows code that adapts these modules."""

from __future__ import annotations

import html
import json
from pathlib import Path

from bmforge.html_page import write_page
from bmforge.tune.delta.tree import ModuleRun, short_count, walk_rows

__all__ = ["write_tree_page"]

# Adapter types with user-selectable targets, in the order of the page's list.
_TYPES = ("Lora", "Adapter", "LowRankAdapter", "Compacter", "BitFit", "IA3")
_STYLE = """
#say{background:var(--bg);border-bottom:1px solid var(--rule);padding:10px 0;position:sticky;top:0}
#say pre{background:var(--card);margin:6px 0;padding:8px}table{width:100%}
td{padding:2px 10px;vertical-align:top}td:last-child{text-align:right;white-space:nowrap}
tr[data-targets]{cursor:pointer}tr[data-targets]:hover,tr:focus{background:var(--rule)}
tr.marked,tr.marked:hover{background:var(--mark)}
.kind{color:var(--c3)}.trained{color:var(--c1)}.frozen{color:var(--soft)}.delta{color:var(--c4)}
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
    (targets.length ? `, targets=[${listed}])` : ")  # default targets");
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


def write_tree_page(path: Path, row: ModuleRun, title: str) -> Path:
    """Write a module tree as a self-contained HTML page; return the path of the page.

    Args:
        path: output file.
        row: root of the tree, the entry of the whole model (see `fold_tree`).
        title: title of the page.
    """
    counts = row.counts
    summary = f"{counts.total:,} parameters, {counts.trained:,} of them trained"
    if counts.delta:
        summary += f"; {counts.delta:,} belong to deltas"
    types = "".join(f"<option>{name}</option>" for name in _TYPES)
    body = "".join(_line(depth, line_row) for depth, line_row in walk_rows(row))
    section = (
        f"<p>{html.escape(summary)}. Click rows to select targets: the code below attaches an "
        'adapter to them. <span class="trained">trained</span> <span '
        'class="frozen">frozen</span> <span class="delta">delta</span></p><div id="say"><select '
        f'id="type">{types}</select> <button id="copy">copy</button><pre><code '
        f'id="line"></code></pre></div><table><tbody>{body}</tbody></table>'
    )
    return write_page(path, title, "module tree", [section], style=_STYLE, script=_SCRIPT)


def _line(depth: int, row: ModuleRun) -> str:
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
