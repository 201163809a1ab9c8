"""Makes web pages of many layouts, each with the sentences that are its main text."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXTS = {
    "en": "the ferry leaves harbour at six in morning and most people who take it work other side "
    "of bay when fog thick captain waits nobody complains about delay because everyone knows "
    "that sea is older than any timetable gardener measures soil beans need twelve degrees",
    "de": "die Fähre verlässt den Hafen um sechs Uhr morgens und viele Leute fahren mit ihr über "
    "das Wasser wenn Nebel dicht ist wartet Kapitän niemand beschwert sich weil jeder weiß "
    "dass Meer älter als Fahrplan Gärtner misst Boden Bohnen brauchen zwölf Grad Wärme",
    "ru": "паром уходит в шесть часов утра и многие люди работают на другом берегу залива когда "
    "туман густой капитан ждёт никто не жалуется потому что море старше любого расписания "
    "садовник измеряет почву бобам нужно двенадцать градусов тепла весной",
}
WORDS = {
    **{name: text.split() for name, text in _TEXTS.items()},
    "zh": list(
        "清晨六点开往北部岛屿的渡轮准时离开码头乘坐这班船的人大多在对岸小港口工作他们彼此认识"
    ),
    "ja": list(
        "北の島々へ向かうフェリーは毎朝六時に出発します乗る人の多くは対岸の港で働いていて霧が"
    ),
}
_MENU = ("Home", "About us", "Contact", "Products", "Login", "Help", "Careers", "Imprint")
FLAT = ("body_p", "body_div", "breaks", "table", "headings", "body_ul")
NESTED = ("article", "main", "divs", "bare_divs", "quotes", "terms", "howto", "sections", "content")
LAYOUTS = FLAT + NESTED


@dataclass(frozen=True)
class Page:
    """A page, its main sentences in order, and the sentences around them."""

    html: str
    sentences: list[str]
    around: list[str]
    layout: str
    language: str


class _Writer:
    def __init__(self, draw: random.Random, language: str) -> None:
        self.draw, self.language = draw, language
        self.sentences: list[str] = []

    def sentence(self) -> str:
        draw = self.draw
        words = [draw.choice(WORDS[self.language]) for _ in range(draw.randrange(9, 24))]
        if self.language in ("zh", "ja"):
            return "".join(words) + "。"
        words[0] = words[0].capitalize()
        return " ".join(words) + draw.choice("..?!")

    def main(self) -> str:
        self.sentences.append(self.sentence())
        return self.sentences[-1]

    def paragraph(self) -> str:
        space = "" if self.language in ("zh", "ja") else " "
        return space.join(self.main() for _ in range(self.draw.randrange(2, 6)))

    def ruby(self) -> str:
        text = self.paragraph()
        if self.language == "ja":
            return text.replace("港", "<ruby>港<rp>(</rp><rt>みなと</rt><rp>)</rp></ruby>", 1)
        return text

    def items(self, tag: str = "ul") -> str:
        inner = "".join(f"<li>{self.main()}</li>" for _ in range(self.draw.randrange(3, 7)))
        return f"<{tag}>{inner}</{tag}>"

    def blocks(self, layout: str) -> str:
        """Write the main text."""
        p, n = self.ruby, self.draw.randrange(3, 7)
        if layout in ("body_p", "article", "main", "content"):
            return "".join(f"<p>{p()}</p>" for _ in range(n))
        if layout in ("body_div", "bare_divs"):
            return "".join(f"<div>{p()}</div>" for _ in range(n))
        if layout == "breaks":
            return "<br><br>".join(p() for _ in range(n))
        if layout == "table":
            return f"<table><tr><td>{''.join(f'<p>{p()}</p>' for _ in range(n))}</td></tr></table>"
        if layout in ("headings", "sections"):
            tag = "section" if layout == "sections" else "div"
            return "".join(f"<{tag}><h2>Part {i}</h2><p>{p()}</p></{tag}>" for i in range(n))
        if layout in ("body_ul", "howto"):
            return "".join(f"<p>{p()}</p>{self.items()}" for _ in range(2)) + f"<p>{p()}</p>"
        if layout == "quotes":
            return "".join(f"<p>{p()}</p><blockquote><p>{p()}</p></blockquote>" for _ in range(3))
        if layout == "terms":
            inner = "".join(f"<dt>Term {i}</dt><dd>{self.main()}</dd>" for i in range(n))
            return f"<p>{p()}</p><dl>{inner}</dl><p>{p()}</p>"
        return "".join(f"<div><div><p>{p()}</p></div></div>" for _ in range(n))


def make_page(seed: int, layout: str, language: str) -> Page:
    """Make the page of a seed."""
    draw = random.Random(f"{seed} {layout} {language}")
    writer = _Writer(draw, language)
    body = writer.blocks(layout)
    around = _Writer(draw, language)
    wrap = {
        "article": "<article><h1>A title</h1>{}</article>",
        "main": "<main>{}</main>",
        "howto": "<main><article>{}</article></main>",
        "content": '<div id="content" class="post-content">{}</div>',
        "sections": '<div class="wrapper"><article>{}</article></div>',
        "divs": '<div class="page"><div class="inner">{}</div></div>',
    }.get(layout, "{}")
    html = (
        f'<!DOCTYPE html><html lang="{language}"><head><meta charset="utf-8">'
        f"<title>A title</title></head><body>{_head(draw)}{wrap.format(body)}"
        f"{_tail(draw, around)}</body></html>"
    )
    return Page(html, writer.sentences, around.sentences, layout, language)


def _links(draw: random.Random, count: int) -> str:
    names = [draw.choice(_MENU) for _ in range(count)]
    return "".join(f'<li><a href="/{name}">{name}</a></li>' for name in names)


def _head(draw: random.Random) -> str:
    return draw.choice(
        (
            f"<nav><ul>{_links(draw, 6)}</ul></nav>",
            f'<div class="menu"><ul>{_links(draw, 5)}</ul></div>',
            f"<header><h3>A site</h3><ul>{_links(draw, 4)}</ul></header>",
            "",
        )
    )


def _tail(draw: random.Random, around: _Writer) -> str:
    parts = [
        f"<footer><p>{around.main()}</p><ul>{_links(draw, 5)}</ul></footer>",
        f'<aside class="sidebar"><h3>More</h3><p>{around.main()}</p></aside>',
        f'<div class="cookie-banner">{around.main()} <button>OK</button></div>',
        f'<div class="related-posts"><ul>{_links(draw, 6)}</ul></div>',
        f'<div id="footer">{around.main()}</div>',
        '<div class="share-buttons"><a href="#">Tweet</a> <a href="#">Like</a></div>',
    ]
    draw.shuffle(parts)
    return "".join(parts[: draw.randrange(1, 5)])
