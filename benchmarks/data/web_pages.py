"""Generated web pages with menus, ads, comments and footers around known texts.

There are 20 templates: five positions of the text, each with four arrangements of the other parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.data.texts import Texts

__all__ = ["ADS", "COMMENTS", "FOOTERS", "MENUS", "make_pages"]

MENUS = {
    "en": ["Home", "World", "Business", "Sport", "Sign in", "Weather", "Contact us", "About"],
    "zh": ["首页", "国际", "财经", "体育", "登录", "天气", "联系我们", "关于本站"],
}
ADS = {
    "en": "Limited offer! Save 40 % on garden furniture today, click here to order.",
    "zh": "限时特惠！花园家具今日六折，点击这里立即订购。",
}
COMMENTS = {
    "en": ["First!", "I totally disagree with this article.", "Thanks for sharing, greetings."],
    "zh": ["沙发！", "完全不同意楼主的观点。", "感谢分享，问好大家。"],
}
FOOTERS = {
    "en": "© 2024 The Daily Example. All rights reserved. Terms of use. Privacy policy.",
    "zh": "版权所有 © 2024 示例日报 京ICP备12345678号 使用条款 隐私政策",
}
# Elements around the text: before it, after it.
POSITIONS = [
    ("<article>", "</article>"),
    ("<main><article class=post>", "</article></main>"),
    ('<div id="content"><div class="text">', "</div></div>"),
    ('<table><tr><td width="70%">', "</td></tr></table>"),
    ('<div class="entry-content">', "</div>"),
]


def write_page(template: int, language: str, title: str, parts: list[str]) -> tuple[str, list[str]]:
    """Return a page of one of 20 templates, and its texts outside the main text."""
    before, after = POSITIONS[template % 5]
    style = template // 5
    links = "".join(f'<li><a href="/{n}">{name}</a></li>' for n, name in enumerate(MENUS[language]))
    menu = (
        f"<nav><ul>{links}</ul></nav>" if style % 2 else f'<div class="menu"><ul>{links}</ul></div>'
    )
    ad = f'<div class="ad banner"><a href="//ads.example/1">{ADS[language]}</a></div>'
    comments = "".join(
        f'<div class="comment"><b>user{n}</b><p>{text}</p></div>'
        for n, text in enumerate(COMMENTS[language])
    )
    kind = "section" if style < 2 else "div"
    comments = f'<{kind} id="comments" class="comments">{comments}</{kind}>'
    footer = f"<footer><p>{FOOTERS[language]}</p></footer>"
    if style >= 2:
        footer = f'<div class="footer">{FOOTERS[language]}</div>'
    side = f'<aside class="sidebar">{ad}</aside>' if style in (1, 3) else ad
    body = "".join(f"<p>{part}</p>" for part in parts)
    page = (
        f'<!DOCTYPE html><html lang="{language}"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>p{{margin:1em}}</style><script>var a = '{ADS[language]}';</script></head><body>"
        f"{menu}{side if style < 2 else ''}{before}<h1>{title}</h1>{body}{after}"
        f"{'' if style < 2 else side}{comments}{footer}</body></html>"
    )
    return page, [*MENUS[language], ADS[language], *COMMENTS[language], FOOTERS[language]]


def make_pages(texts: Texts, generator: random.Random) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yield 200 pages: template, page, main text, other texts."""
    news, poems = [text for text in texts[0] if len(text) > 150], texts[1]
    for number in range(200):
        language = ("en", "zh")[number // 20 % 2]
        parts = generator.sample(news if language == "en" else poems, 6)
        parts = [part.replace("<", " ").replace("\n", "") for part in parts]
        title = parts.pop()[:30]
        page, others = write_page(number % 20, language, title, parts)
        yield number % 20, page, "\n".join([title, *parts]), others
