"""Filter rules for Chinese: published bounds, and additional rules against advertisements.

Verse and lists have separate bounds: they are short, their lines are short, and old verse has no
stop words.
"""

from __future__ import annotations

import re
from dataclasses import replace

from bmforge.data.clean.characters import HAN_RUN
from bmforge.data.clean.rule import Bounds, Rule, RuleSet
from bmforge.data.clean.rules.fineweb import line_rules
from bmforge.data.clean.rules.gopher import quality_rules, repetition_rules
from bmforge.data.clean.statistics import TextStatistics

__all__ = ["CHINESE", "tell_form"]

_WEB_TEXT = "Chen et al. 2023, arXiv:2311.01149 (ChineseWebText)"
_FINEWEB_2 = "FineWeb-2, configs/cmn_Hani.yml (Penedo et al. 2025, arXiv:2506.20920)"
_OWN = "limit chosen for bmforge; see docs/guides/chinese_text.md"
_STOP_WORDS = frozenset("的年在月是和日了於·為有被人中为他與後也而由")
_GRAM = 13
# At most half a phrase per line, ChineseWebText's bound for its word list.
_ADS = re.compile(
    "加微信|加[Qq]{2}|点击(?:购买|领取|进入|下载)|立即(?:购买|下单|抢购|咨询)|限时(?:优惠|抢购|特价)"
    "|全国包邮|包邮|货到付款|免费(?:领取|试用|咨询|热线)|招商加盟|代理加盟|诚招代理|优惠券|秒杀价?"
    "|厂家直销|批发价格|咨询热线|服务热线|订购热线|联系电话|欢迎来电|在线客服|扫码关注|扫一扫|长按识别"
    "|关注(?:我们|公众号)|刷单|代开发票|办证|网上赌场|真人娱乐|六合彩|时时彩|返利|日结|贷款秒批"
    "|點擊購買|加盟熱線|免費領取|限時優惠"
)
_CONTACT = re.compile(
    r"(?<!\d)1[3-9]\d[- ]?\d{4}[- ]?\d{4}(?!\d)|(?<!\d)(?:400|800)-?\d{3}-?\d{4}(?!\d)"
    r"|(?<!\d)0\d{2,3}-\d{7,8}(?!\d)|(?:[Qq]{2}|微信|[Ww]e[Cc]hat|VX|vx)号?"
    r"\s{0,3}[:：]?\s{0,3}[A-Za-z0-9_-]{5,}"
)
_VERSE_LENGTHS = frozenset((3, 4, 5, 6, 7))
_LIST_ITEM = re.compile(
    r"\s*(?:[-*•·●○■◆]|\d{1,3}[.、)）]|[(（]?[一二三四五六七八九十]{1,3}[)）、])"
)


def tell_form(text: TextStatistics) -> str:
    """Classify a text as ``"poem"``, ``"list"`` or ``"prose"``.

    A poem has at least four clauses; at least four fifths of them have 3 to 7 characters, in at
    most two different lengths, regardless of line breaks. A list has at least three items, which
    are most of its lines.
    """
    runs = [len(run) for run in HAN_RUN.findall(text.text)]
    if len(runs) >= 4:
        common = sorted((runs.count(size) for size in _VERSE_LENGTHS), reverse=True)[:2]
        if sum(common) >= 0.8 * len(runs):
            return "poem"
    lines = text.filled_lines
    items = sum(_LIST_ITEM.match(line) is not None for line in lines)
    return "list" if items >= 3 and 2 * items > len(lines) else "prose"


def _characters(text: TextStatistics) -> float:
    return text.characters


def _han_share(text: TextStatistics) -> float:
    return text.han / max(text.characters, 1)


def _line_length(text: TextStatistics) -> float:
    return text.characters / max(len(text.filled_lines), 1)


def _repeated_grams(text: TextStatistics) -> float:
    """Return the fraction of 13-character n-grams that repeat an earlier one."""
    solid = "".join(text.text.split())
    runs = [solid[i : i + _GRAM] for i in range(len(solid) - _GRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _advertisements(text: TextStatistics) -> float:
    return sum(1 for _ in _ADS.finditer(text.text)) / max(len(text.filled_lines), 1)


def _contacts(text: TextStatistics) -> float:
    return 1000 * sum(1 for _ in _CONTACT.finditer(text.text)) / max(text.characters, 200)


_NONE = Bounds()
_ANY = {"poem": _NONE, "list": _NONE}
_OWN_RULES = (
    Rule(
        "too_short",
        _characters,
        Bounds(200),
        "characters other than spaces",
        _WEB_TEXT,
        "版权所有",
        {"poem": Bounds(16), "list": Bounds(50)},
    ),
    Rule(
        "too_few_chinese",
        _han_share,
        Bounds(0.3),
        "fraction of Chinese characters",
        _WEB_TEXT,
        "ID: 82731 size: 41x22 OK 确定",
    ),
    Rule(
        "short_lines",
        _line_length,
        Bounds(10),
        "mean number of characters per line",
        _WEB_TEXT,
        "首页\n产品\n新闻\n联系我们",
        {"poem": Bounds(4), "list": Bounds(4)},
    ),
    Rule(
        "repeated_grams",
        _repeated_grams,
        Bounds(None, 0.5),
        f"fraction of {_GRAM}-character sequences that occurred before",
        _WEB_TEXT,
        "一段话贴了三遍",
    ),
    Rule(
        "advertisement",
        _advertisements,
        Bounds(None, 0.5),
        "advertising phrases per line",
        f"the limit of {_WEB_TEXT} for listed words; the word list is bmforge's own",
        "厂家直销,全国包邮,立即购买!",
    ),
    Rule(
        "contacts",
        _contacts,
        Bounds(None, 5),
        "phone numbers and accounts per 1,000 characters (at least 200)",
        _OWN,
        "微信号:abc12345 电话:13800138000",
    ),
)
# Published rules to skip per form: in a short text a single n-gram is a large share.
_NOT_FOR = {
    "top_2_gram": _ANY,
    "top_3_gram": _ANY,
    "top_4_gram": _ANY,
    "short_doc": {"poem": Bounds(8), "list": Bounds(20)},
    "line_punct_ratio": _ANY,
    "list_ratio": _ANY,
    "too_many_bullets": {"list": _NONE},
    "below_alpha_threshold": {"poem": Bounds(0.6), "list": Bounds(0.6)},
    "enough_stop_words": _ANY,
}
_PUBLISHED = (
    *repetition_rules(
        {"dup_line_frac": 0.287},
        ((2, 0.256), (3, 0.201), (4, 0.171)),
        ((5, 0.198), (6, 0.182), (7, 0.167), (8, 0.154), (9, 0.14), (10, 0.127)),
        _FINEWEB_2,
    ),
    *line_rules(0.106, None, 0.1, 0.178, _FINEWEB_2),
    *quality_rules((1, 5), 0.735, _STOP_WORDS, source=_FINEWEB_2),
)
CHINESE = RuleSet(
    "chinese",
    2,
    _OWN_RULES + tuple(replace(rule, forms=_NOT_FOR.get(rule.name, {})) for rule in _PUBLISHED),
    f"{_WEB_TEXT}; {_FINEWEB_2}",
    form=tell_form,
)
