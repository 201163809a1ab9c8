"""Writes HTML pages of reports: self-contained, without network access, light or dark."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bmforge.files import replace_file

__all__ = ["write_page"]


def write_page(
    path: Path, name: str, kind: str, sections: Sequence[str], *, style: str = "", script: str = ""
) -> Path:
    """Write a report as an HTML page and return its path.

    The page's content security policy forbids network access and all scripts except `script`,
    so that no script in a reported text can run, even if it is not escaped correctly.

    Args:
        path: file to write.
        name: name of the reported object.
        kind: kind of report, such as ``"training report"``.
        sections: HTML fragments in order; empty fragments are omitted.
        style: additional CSS.
        script: JavaScript that runs after the sections.
    """
    title = f"{kind[0].upper()}{kind[1:]}, bmforge"
    body = [f"<header><h1>{escape(name)}</h1><p>{escape(title)}</p></header>", *sections]
    last = f"<script>{script}</script>" if script else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: {escape(kind)}</title><style>{_STYLE}{style}</style></head>"
        f"<body><main>{''.join(body)}</main>{last}</body></html>\n"
    )
    replace_file(path, page)
    return path


_STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#667085;--rule:#e3e7ee;--c1:#2563eb;
--c2:#e07b00;--c3:#0f9d76;--c4:#8b5cf6;--bad:#dc2626;--mark:#fff1c9}
@media(prefers-color-scheme:dark){:root{--bg:#11151b;--card:#1a2029;--ink:#e6eaf0;--soft:#94a0b3;
--rule:#2b3442;--c1:#6ea8fe;--c2:#ffb057;--c3:#4fd1a5;--c4:#b79bff;--bad:#ff7b7b;--mark:#4a3d14}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Noto Sans CJK SC",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}h1{font-size:26px;margin:0}
header p{color:var(--soft);margin:2px 0 20px}h2{font-size:18px;margin:34px 0 10px}
h3{font-size:14px;margin:14px 0 6px;color:var(--soft);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px}
.tiles div,figure,table,details{background:var(--card);border:1px solid var(--rule);
border-radius:10px}.tiles div{padding:12px 14px}.tiles b{display:block;font-size:20px;
font-variant-numeric:tabular-nums}.tiles span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;
margin-top:16px}figure{margin:0 0 12px;padding:14px 16px}.chart{margin:0}
figcaption{color:var(--soft);font-size:13px;margin-bottom:6px}
figcaption b{color:var(--ink);font-size:15px;margin-right:14px}
.chart figcaption span{margin-right:12px}.chart figcaption span::before{content:"";display:
inline-block;width:14px;height:3px;border-radius:2px;background:var(--c);vertical-align:middle;
margin-right:6px}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.skip{--c:var(--bad)}svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);
font-size:12px}.grid{stroke:var(--rule)}polyline{fill:none;stroke:var(--c);stroke-width:1.8;
stroke-linejoin:round}.dot{fill:var(--c)}.dot.hidden{opacity:0;r:5px}.dot.hidden:hover{opacity:1}
.skipline{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:4 3;opacity:.75}.none{color:
var(--soft);text-align:center;padding:60px 0}table{border-collapse:separate;border-spacing:0;
overflow:hidden;min-width:min(100%,420px)}th,td{padding:7px 14px;text-align:left;font-weight:400}
tr+tr th,tr+tr td{border-top:1px solid var(--rule)}.num{text-align:right;
font-variant-numeric:tabular-nums}.bar{width:260px}.bar i{display:block;height:9px;
border-radius:5px;background:var(--c1)}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;
font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}mark{background:var(--mark);
color:inherit;border-radius:3px}details{padding:12px 16px}summary{cursor:pointer;color:var(--soft);
margin-bottom:6px}
"""
