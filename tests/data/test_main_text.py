"""The main text of pages in 15 layouts and 5 languages, against the sentences put into them."""

from __future__ import annotations

import re

import pytest
from page_layouts import LAYOUTS, WORDS, Page, make_page

from bmforge.data.sources.document import Document
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.main_text import find_main_text, unwrap_ruby
from bmforge.data.sources.record import ReadOptions, Where

pytest.importorskip("resiliparse")
trafilatura = pytest.importorskip("trafilatura")

_SPACE = re.compile(r"\s+")


def read(page: Page, reader: str = "resiliparse") -> str:
    found = parse_page(page.html.encode(), Where("x"), ReadOptions(html_reader=reader))
    return found.text if isinstance(found, Document) else ""


def read_by_resiliparse(page: Page) -> str:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    return extract_plain_text(
        HTMLTree.parse(page.html), preserve_formatting=True, main_content=True
    )


def read_by_trafilatura(page: Page) -> str:
    return trafilatura.extract(page.html, include_comments=False) or ""


def grade(text: str, page: Page) -> tuple[float, float]:
    """Return recall and F1 of whole sentences."""
    plain = _SPACE.sub("", text)
    hits, wrong = (
        sum(
            _SPACE.sub("", re.sub("<rp>.*?</rp>|<rt>.*?</rt>|<.*?>", "", one)) in plain
            for one in group
        )
        for group in (page.sentences, page.around)
    )
    recall, precision = hits / len(page.sentences), hits / max(hits + wrong, 1)
    return recall, 2 * recall * precision / max(recall + precision, 1e-9)


def grade_all(pages: list[Page], reader) -> tuple[float, float]:
    grades = [grade(reader(page), page) for page in pages]
    return tuple(sum(column) / len(pages) for column in zip(*grades, strict=True))  # type: ignore[return-value]


def check(pages: list[Page]) -> None:
    recall, f1 = grade_all(pages, read)
    assert recall >= 0.98
    assert f1 > max(
        grade_all(pages, read_by_resiliparse)[1], grade_all(pages, read_by_trafilatura)[1]
    )
    assert grade_all(pages, lambda page: read(page, "trafilatura"))[0] >= 0.98


def test_main_text_keeps_the_sentences_that_single_readers_lose():
    check([make_page(1, layout, language) for layout in LAYOUTS for language in WORDS])


@pytest.mark.long
def test_main_text_of_three_hundred_pages():
    seeds = range(100, 104)
    pages = [make_page(n, one, name) for n in seeds for one in LAYOUTS for name in WORDS]
    assert len(pages) == 300
    check(pages)


def test_a_list_close_to_the_body_is_kept_and_a_menu_is_not():
    page = make_page(7, "howto", "en")
    assert all(sentence in read(page) for sentence in page.sentences)
    menu = (
        '<ul><li><a href="/a">One link of the page</a></li><li><a href="/b">Another</a></li></ul>'
    )
    html = page.html.replace("</p><ul>", f"</p>{menu}<p>And then this follows.</p><ul>", 1)
    found = parse_page(html.encode(), Where("x"), ReadOptions())
    assert isinstance(found, Document)
    assert "One link of the page" not in found.text


ITEMS = ("two eggs", "<a href='/s'>sugar</a> and salt", "12 °C", "面粉")
MENU = "<ul><li><a href='/a'>Part one</a></li><li><a href='/b'>Part two</a></li></ul>"


@pytest.mark.parametrize("language", WORDS)
@pytest.mark.parametrize("end", ["</article>", "</main>", "</div>", "</section>", ""])
def test_short_lines_next_to_the_main_text_are_kept_and_menus_are_not(end, language):
    """Lists at both ends and before a table, and captions; the sentences are all extracted."""
    page = make_page(3, "article", language)
    text = re.search(r"<article>.*</article>", page.html)
    assert text is not None
    paragraphs = re.findall("<p>.*?</p>", text[0])
    lists = ["<ul>" + "".join(f"<li>{n} {one}</li>" for one in ITEMS) + "</ul>" for n in range(3)]
    table = "<h2>Sizes</h2><table><tr><td>left cell</td><td>right cell</td></tr></table>"
    figure = "<figure class='wide'><img src='a.png'><figcaption>{}</figcaption></figure>"
    main = [MENU, lists[0], *paragraphs, figure.format("The <b>mill</b>, 1920"), lists[1], table]
    main += [lists[2], figure.format("<p>Another mill</p>"), MENU]
    body = "".join(main)
    html = page.html.replace(text[0], end.replace("/", "") + body + end)
    document = parse_page(html.encode(), Where("x"), ReadOptions())
    assert isinstance(document, Document)
    plain = _SPACE.sub("", document.text)
    short = [f"{n} {one}" for n in range(3) for one in ITEMS] + ["The mill, 1920", "Another mill"]
    expected = [*short, "left cell", *page.sentences]
    assert all(_SPACE.sub("", re.sub("<.*?>", "", one)) in plain for one in expected)
    assert not any(_SPACE.sub("", one) in plain for one in ("Part one", "Part two", *page.around))


@pytest.mark.parametrize(
    ("page", "plain"),
    [
        ("<ruby>漢<rp>(</rp><rt>かん</rt><rp>)</rp>字<rt>じ</rt></ruby>を読む", "漢字を読む"),
        ("<ruby><rb>漢</rb><rt>かん<rb>字</rb><rt>じ</ruby>", "漢字"),
        ("<RUBY lang=ja>本<rt>ほん</RUBY>と<ruby>木<rt>き</rt></ruby>", "本と木"),
        ("<ruby>" * 3 + "字\n<rt>じ</rt></ruby>", "<ruby><ruby>字\n"),
        ("<p>no reading</p>", "<p>no reading</p>"),
    ],
)
def test_ruby_keeps_its_base_text_alone(page, plain):
    assert unwrap_ruby(page) == plain


def test_lost_text_is_measured():
    from resiliparse.parse.html import HTMLTree

    sentences = [f"This is the sentence number {n} of a page that has no end." for n in range(40)]
    page = "<body>" + "".join(f"<p>{one}</p>" for one in sentences) + "</body>"
    main = find_main_text(HTMLTree.parse(page), page, "resiliparse")
    lost = sum(len(one) for one in sentences if one not in main.text)
    assert main.lost_ratio == pytest.approx(lost / sum(map(len, sentences)), abs=0.01)


def test_links_are_measured_by_characters():
    page = "<body><p>abcd <a href='/x'>efgh</a> ij</p><a href='/y'><p>klmnop</p></a></body>"
    from resiliparse.parse.html import HTMLTree

    assert find_main_text(HTMLTree.parse(page), page, "resiliparse").link_ratio == 0.625


@pytest.mark.parametrize("reader", ["resiliparse", "trafilatura"])
def test_main_text_in_an_element_with_the_name_of_a_skipped_one_is_kept(reader):
    """Without the skipped elements, only the lead is visible; its list is restored."""
    page = make_page(5, "article", "en")
    text = re.search(r"<article>(.*)</article>", page.html, re.S)
    assert text is not None
    lead = [
        f"This is the lead number {n} of a page about the ferry and the harbour." for n in "123"
    ]
    body = f"<p>{lead[0]}</p><ul><li>{lead[1]}</li></ul><p>{lead[2]}</p>"
    body += f"<div class='social-news'>{text[1]}</div>"
    html = page.html.replace(text[0], f"<article>{body}</article>")
    found = parse_page(html.encode(), Where("x"), ReadOptions(html_reader=reader))
    assert isinstance(found, Document)
    plain = _SPACE.sub("", found.text)
    assert all(_SPACE.sub("", one) in plain for one in (*lead, *page.sentences))
