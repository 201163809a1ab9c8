"""Rules: figures against a plain second reading, verdicts on a table of texts, and explanations."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.filter_step import RuleFilter, clean_documents, explain
from bmforge.data.clean.rule import Bounds, Rule, RuleSet, check_text
from bmforge.data.clean.rules import RULE_SETS, RULES
from bmforge.data.clean.rules.chinese import tell_form
from bmforge.data.clean.statistics import TextStatistics
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError

NEWS = (
    "The council met on Monday to talk about the new bridge over the river. Several people "
    "who live near the old mill said that they have waited for it since the flood of last "
    "year. The mayor promised an answer within a month. Nobody knew what the work would cost, "
    "and a report is to follow. Two members asked for a vote. The meeting ended late in the "
    "evening."
)
POEM = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。"
CHINESE_NEWS = (
    "昨天下午，市政府召开会议，讨论在河上修建新桥的计划。住在老磨坊附近的居民说，自从去年发生洪水以来，"
    "他们一直在等待这座桥。市长承诺在一个月之内作出答复，并且表示工程的费用还没有最后确定。\n"
    "会议开到很晚才结束，有两位代表提出应当先进行投票，其他人则认为需要等专家的报告出来以后再作决定。"
    "按照目前的安排，报告会在下个星期公布，居民也可以到图书馆去查看有关的图纸和说明材料。\n"
    "专家认为，新桥建成之后，两岸的交通会方便很多，孩子们上学也不用再绕远路，附近商店的生意可能会好起来。"
)


def plain_top(words, text, n):
    """The most frequent run, counted by hand; the first one where several are."""
    runs = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not runs:
        return 0.0
    counts = Counter(runs)
    best = max(counts.values())
    first = next(run for run in runs if counts[run] == best)
    return len(first) * best / len(text)


def plain_repeated(words, text, n):
    """Repeated runs, one after the other."""
    seen, total, at = [], 0, 0
    while at + n <= len(words):
        run = "".join(words[at : at + n])
        if run in seen:
            total, at = total + len(run), at + n
        else:
            seen.append(run)
            at += 1
    return total / len(text)


@pytest.mark.parametrize("seed", range(4))
def test_runs_of_words_are_counted_as_by_hand(seed):
    draw = random.Random(seed)
    words = [draw.choice(["a", "b", "ab", "c", "abc", "d"]) for _ in range(120)]
    text = " ".join(words)
    figures = TextStatistics(text, str.split)
    for n in range(2, 11):
        assert figures.top_ngram_share(n) == plain_top(words, text, n)
        assert figures.repeated_ngram_share(n) == plain_repeated(words, text, n)


# A text that breaks each rule of the English sets, all others before it kept.
LINE = "This is what people said about it at home, and they were right."
BROKEN = {
    "gopher_repetition.dup_para_frac": f"{LINE}\n\nx y\n\nx y\n\nx y",
    "gopher_repetition.dup_para_char_frac": "\n\n".join([LINE, NEWS, "b", "c", NEWS]),
    "gopher_repetition.dup_line_frac": "\n".join([NEWS, "a", "a", "a"]),
    "gopher_repetition.dup_line_char_frac": "\n".join([LINE, NEWS, "c", "d", "e", NEWS]),
    "gopher_repetition.top_2_gram": "buy now and " * 2 + "buy now or buy now we say",
    "gopher_repetition.duplicated_5_n_grams": f"{LINE} {NEWS[:250]} However: {NEWS[:250]}",
    "gopher_quality.short_doc": "too short",
    "gopher_quality.below_avg_threshold": "a b " * 40,
    "gopher_quality.above_avg_threshold": "internationalisation " * 60,
    "gopher_quality.too_many_hashes": "#word " * 60,
    "gopher_quality.too_many_ellipsis": "word... " * 60,
    "gopher_quality.too_many_bullets": "\n".join(["- four words of text"] * 20),
    "gopher_quality.too_many_end_ellipsis": "\n".join([f"{LINE[:-1]} …"] * 6),
    "gopher_quality.below_alpha_threshold": "word 1999 " * 40,
    "gopher_quality.enough_stop_words": "green apples red pears " * 20,
    "c4.lorem_ipsum": f"{NEWS}\nAnd Lorem Ipsum is here.",
    "c4.curly_bracket": f"{NEWS}\nLet x be { {1} }, they said.",
    "c4.too_few_sentences": "One is here now. Two is here.\nno mark at the end",
    "fineweb.empty": "\n \n",
    "fineweb.line_punct_ratio": "one\ntwo\nthree",
    "fineweb.short_line_ratio": "Yes.\nNo.\nYes!\n" + LINE,
    "fineweb.char_dup_ratio": f"{NEWS}\n{LINE}\n{LINE}",
    "fineweb.list_ratio": ("\n" * 12).join([LINE, "A second line that is not short."]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_text_that_breaks_a_rule_is_dropped_by_it(rule):
    name, _, _ = rule.partition(".")
    found = check_text(TextStatistics(BROKEN[rule]), RULE_SETS[name])
    assert found is not None
    assert found.rule == rule
    assert found.excerpt == BROKEN[rule][:200]
    assert found.value != found.bound


@pytest.mark.parametrize("name", RULE_SETS)
def test_sound_texts_pass(name):
    text = CHINESE_NEWS if name == "chinese" else NEWS
    assert check_text(TextStatistics(text), RULE_SETS[name]) is None


def test_c4_keeps_lines_that_are_sentences():
    page = "\n".join(
        [
            "Home | Shop",
            LINE,
            "We use cookies here.",
            "Enable JavaScript, please.",
            f"{NEWS}[1]",
            "Ok.",
        ]
    )
    kept = RuleFilter("none", (RULE_SETS["c4"],))(Document(page, "page"))
    assert isinstance(kept, Document)
    assert kept.text == f"{LINE}\n{NEWS}"
    assert kept.id == Document(page, "page").id


CHINESE_DROPS = {
    "too_short": "版权所有，不得转载。",
    "too_few_chinese": "标题 " + "ID 82731 size 41x22 OK " * 20,
    "short_lines": "\n".join(f"栏目{i}新闻中心" for i in range(40)),
    "repeated_grams": CHINESE_NEWS * 3,
    "advertisement": CHINESE_NEWS + "厂家直销，全国包邮，立即购买！点击领取优惠券。",
    "contacts": CHINESE_NEWS + "找小王13800138000，或者微信号：wang_12345。",
    "line_punct_ratio": CHINESE_NEWS.replace("。", "，"),
    "list_ratio": CHINESE_NEWS.replace("，", "，\n\n"),
}


@pytest.mark.parametrize("rule", CHINESE_DROPS)
def test_chinese_rules_drop_what_they_are_for(rule):
    pytest.importorskip("rjieba")
    found = check_text(TextStatistics(CHINESE_DROPS[rule]), RULE_SETS["chinese"])
    assert found is not None
    assert found.rule == f"chinese.{rule}"


def test_verse_and_lists_have_bounds_of_their_own():
    pytest.importorskip("rjieba")
    steps = "1. 先把土豆洗干净\n2. 切成小块，放进锅里\n"
    steps += "3. 加水煮二十分钟\n4. 放盐和葱花\n5. 趁热端上桌，请客人们品尝"
    forms = {"poem": POEM, "list": steps, "prose": CHINESE_NEWS}
    for form, text in forms.items():
        figures = TextStatistics(text)
        assert tell_form(figures) == form
        assert check_text(figures, RULE_SETS["chinese"]) is None
    prose = RULE_SETS["chinese"]
    strict = RuleSet("strict", 1, prose.rules)  # without forms
    assert check_text(TextStatistics(POEM), strict).rule == "strict.too_short"


def test_mixed_rules_go_by_language():
    pytest.importorskip("rjieba")
    judge = RuleFilter("mixed")
    short = Document("短", "f"), Document("short", "f"), Document("court", "f", language="fr")
    verdicts = [judge(document) for document in short]
    assert [getattr(one, "rule", "kept") for one in verdicts] == [
        *["chinese.too_short", "gopher_quality.short_doc", "kept"]
    ]


@pytest.mark.parametrize(
    ("tag", "rule"),
    [
        *[("zh-CN", "chinese.too_short"), ("ZH_Hant", "chinese.too_short")],
        *[("en-GB", "gopher_quality.short_doc"), ("fr-CA", "kept"), ("zha", "kept")],
    ],
)
def test_rules_go_by_the_language_of_a_longer_tag(tag, rule):
    """As RFC 5646 divides tags; "zha" is Zhuang."""
    pytest.importorskip("rjieba")
    verdict = RuleFilter("mixed")(Document("短", "f", language=tag))
    assert getattr(verdict, "rule", "kept") == rule


def test_explain_shows_every_rule_beside_its_bound():
    pytest.importorskip("rjieba")
    shown = explain(Document("a b " * 40, "f"), "english")
    sets = [RULE_SETS[name] for name in RULES["english"]["*"]]
    assert [one.rule for one in shown] == [f"{s.name}.{r.name}" for s in sets for r in s.rules]
    by_name = {one.rule: one for one in shown}
    length = by_name["gopher_quality.below_avg_threshold"]
    assert (length.value, length.bounds.low, length.passed) == (1.0, 3, False)
    assert by_name["gopher_quality.short_doc"].passed


def test_a_rule_of_the_users_own():
    quiet = Rule("shouts", lambda text: text.text.count("!"), Bounds(high=2))
    judge = RuleFilter("none", (RuleSet("mine", 3, (quiet,)),))
    assert "mine=3" in judge.version
    kept, dropped = clean_documents([Document("a!", "f"), Document("b!!!", "f")], [judge])
    assert kept == Document("a!", "f")
    assert dropped == Drop("mine.shouts", 3, 2, "b!!!")


def test_unknown_rules_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'english'"):
        RuleFilter("englisch")


def test_no_number_breaks_every_bound():
    assert Bounds(high=1).broken_by(float("nan")) == 1
    assert Bounds().broken_by(float("nan")) is None


@pytest.mark.parametrize("text", ["", "\n", "\x00", "\ud800", "。", "a" * 100_000])
@pytest.mark.parametrize("name", RULE_SETS)
def test_no_text_breaks_the_rules_themselves(name, text):
    figures = TextStatistics(text, str.split)
    check_text(figures, RULE_SETS[name])
    for rule in RULE_SETS[name].rules:
        assert rule.measure(figures) >= 0
