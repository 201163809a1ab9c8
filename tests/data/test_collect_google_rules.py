"""robots.txt: own rows for each group of cases in Google's test set, and those of RFC 9309.

The group names are those of robots_test.cc (github.com/google/robotstxt, commit 22b355f of April
2026). The cases where bmforge differs are in `DIFFERENT` and in docs/guides/collecting.md.
"""

from __future__ import annotations

import pytest

from bmforge.data.collect.robots import parse_robots
from bmforge.data.collect.run import clean_url

_GROUPS = "allow: /out/\n\nuser-agent: a\ndisallow: /\nallow: /1/\nuser-agent: b\ndisallow: /\n"
GROUPS = f"{_GROUPS}allow: /2/\n\n\nallow: /3/\nuser-agent: c\n\nuser-agent: a\nallow: /4/\n"
GROUPS += "disallow: /\n"
ALL = "user-agent: *\ndisallow: /\n"
OTHERS = "user-agent: *\ndisallow: /\nuser-agent: kite bird\nallow: /x/\ndisallow: /\n"


def rules(*lines: str) -> str:
    return "\n".join(("user-agent: kite", *lines, ""))


def only(*allowed: str) -> str:
    return rules("disallow: /", *(f"allow: {path}" for path in allowed))


# group of the test set, robots.txt, agent, allowed paths, refused paths
ROWS = [
    ("GoogleOnly_SystemTest", "", "kite", "/ /x", ""),
    ("GoogleOnly_SystemTest", rules("disallow: /"), "kite", "", "/"),
    ("GoogleOnly_SystemTest", rules("disallow: /"), "", "/", ""),
    ("ID_LineSyntax_Line", "agent: kite\nrefuse: /\n", "kite", "/x", ""),
    ("ID_LineSyntax_Line", "user-agent\tkite\ndisallow \t /\n", "kite", "", "/x"),
    ("ID_LineSyntax_Line", "kite\n/\n:\n#\n  \n\0\n", "kite", "/x", ""),
    ("ID_LineSyntax_Groups", GROUPS, "a", "/1/p /4/p", "/2/p /3/p /out/"),
    ("ID_LineSyntax_Groups", GROUPS, "b", "/2/p /3/p", "/1/p /4/p /out/"),
    ("ID_LineSyntax_Groups", GROUPS, "c", "/4/p", "/1/p /out/"),
    *(
        ("ID_LineSyntax_Groups_OtherRules", f"user-agent: a\n{line}\n{ALL}", agent, "", "/")
        for line in ("Sitemap: http://h/map.xml", "An-Unknown-Line: x")
        for agent in ("a", "kite")
    ),
    *(
        ("ID_REPLineNamesCaseInsensitive", text, "kite", "/x/p", "/y/p")
        for name in ("UsEr-AgEnT", "USER-AGENT", "user-agent")
        for text in (f"{name}: kite\nDisAllow: /\nALLOW: /x/\n",)
    ),
    *(
        ("ID_UserAgentValueCaseInsensitive", only("/x/").replace("kite", name), agent, "/x/p", "/p")
        for name in ("KITE BIRD", "kite bird", "KiTe bIrD", "kite/2.1")
        for agent in ("kite", "Kite")
    ),
    (
        "ID_VerifyValidUserAgentsToObey",
        only("/x").replace("kite", "Kite_a-B"),
        "kite_a-b",
        "/x",
        "/",
    ),
    ("GoogleOnly_AcceptUserAgentUpToFirstSpace", OTHERS, "kite", "/x/p", "/p"),
    ("GoogleOnly_AcceptUserAgentUpToFirstSpace", OTHERS, "kite bird", "", "/x/p"),
    ("ID_GlobalGroups_Secondary", f"user-agent: *\nallow: /\n{only()}", "kite", "", "/x"),
    ("ID_GlobalGroups_Secondary", f"user-agent: *\nallow: /\n{only()}", "heron", "/x", ""),
    ("ID_GlobalGroups_Secondary", "user-agent: a\nuser-agent: b\ndisallow: /\n", "c", "/x", ""),
    ("ID_AllowDisallow_Value_CaseSensitive", rules("disallow: /Ab/"), "kite", "/ab/p", "/Ab/p"),
    ("ID_LongestMatch", rules("disallow: /d/p.html", "allow: /d/"), "kite", "/d/q", "/d/p.html"),
    ("ID_LongestMatch", rules("allow: /d/p.html", "disallow: /d/"), "kite", "/d/p.html", "/d/"),
    ("ID_LongestMatch", rules("disallow:", "allow:"), "kite", "/ /x", ""),
    ("ID_LongestMatch", rules("disallow: /d", "allow: /d"), "kite", "/d /d/p", ""),
    ("ID_LongestMatch", rules("disallow: /d", "allow: /d/"), "kite", "/d/", "/d"),
    ("ID_LongestMatch", rules("allow: /pg", "disallow: /*.html"), "kite", "/pg", "/pg.html"),
    (
        "ID_LongestMatch",
        rules("allow: /dd/pg.", "disallow: /*.html"),
        "kite",
        "/dd/pg.html",
        "/q.html",
    ),
    (
        "ID_LongestMatch",
        f"user-agent: *\ndisallow: /1\n{rules('disallow: /2')}",
        "kite",
        "/1",
        "/2",
    ),
    ("ID_Encoding", only("/a?b=c&d=http://h.i?j&k"), "kite", "/a?b=c&d=http://h.i?j&k", "/a?b=c"),
    ("ID_Encoding", only("/a/山"), "kite", "/a/%E5%B1%B1 /a/%e5%b1%b1", "/a/%E5%B1%B0"),
    ("ID_Encoding", only("/a/%e5%B1%b1"), "kite", "/a/%E5%B1%B1", "/a/"),
    ("ID_Encoding", only("/a/%70%71"), "kite", "/a/%70%71", "/a/%70"),
    (
        "ID_SpecialCharacters",
        rules("disallow: /a/b/c", "allow: /a/*/d"),
        "kite",
        "/a/c /a//c",
        "/a/b/c",
    ),
    ("ID_SpecialCharacters", rules("disallow: /a/b$"), "kite", "/a/b/ /a/b/c /a/bc", "/a/b"),
    (
        "ID_SpecialCharacters",
        rules("# disallow: /", "disallow: /a#b", "allow: /"),
        "kite",
        "/b",
        "/a /ac",
    ),
    (
        "GoogleOnly_IndexHTMLisDirectory",
        only("/d/index.html"),
        "kite",
        "/d/ /d/index.html",
        "/d /d/index.htm /d/p /e/",
    ),
    ("GoogleOnly_IndexHTMLisDirectory", only("/d/index.htm"), "kite", "/d/ /d/index.htm", "/d/p"),
    (
        "GoogleOnly_IndexHTMLisDirectory",
        rules("disallow: /d/index.html"),
        "kite",
        "/d/",
        "/d/index.html",
    ),
    ("GoogleOnly_LineTooLong", only(f"/a/{'b' * 30_000}"), "kite", f"/a/{'b' * 30_001}", "/a/b"),
    (
        "GoogleOnly_DocumentationChecks",
        only("/cod"),
        "kite",
        "/cod /cod.html /cod/x /codling/x /cod?x=1",
        "/Cod /a/cod /?x=cod",
    ),
    (
        "GoogleOnly_DocumentationChecks",
        only("/cod*"),
        "kite",
        "/cod /cod.html /cod/x /codling/x /cod?x=1",
        "/Cod /a/cod /?x=cod",
    ),
    (
        "GoogleOnly_DocumentationChecks",
        only("/cod/"),
        "kite",
        "/cod/ /cod/x /cod/?x=1",
        "/cod /cod.html /Cod/x",
    ),
    (
        "GoogleOnly_DocumentationChecks",
        only("/*.py"),
        "kite",
        "/a.py /b/a.py?x=1 /a.py.html /a.py/ /?f=a.py/",
        "/py/ /?py /a.PY",
    ),
    (
        "GoogleOnly_DocumentationChecks",
        only("/*.py$"),
        "kite",
        "/a.py /b/a.py",
        "/a.py?x=1 /a.py/ /a.py3 /?py /apyb /a.PY",
    ),
    (
        "GoogleOnly_DocumentationChecks",
        only("/cod*.py"),
        "kite",
        "/cod.py /codling/a.py?x=1",
        "/Cod.PY /cod",
    ),
    ("GoogleOnly_DocumentationChecks", only("/p"), "kite", "/page", "/q"),
    (
        "GoogleOnly_DocumentationChecks",
        rules("allow: /pg", "disallow: /*.ht"),
        "kite",
        "/pg",
        "/pg.htm",
    ),
    ("GoogleOnly_DocumentationChecks", only("/$"), "kite", "/", "/page.html"),
    *(
        ("ID_LinesNumbersAreCountedCorrectly", text, "b", "/1", "/2")
        for end in ("\n", "\r\n", "\r")
        for lines in (("user-agent: a", "disallow: /1", "user-agent: b", "", "", "disallow: /2"),)
        for text in (end.join(lines), end.join((*lines, "")), f"\n\r\n{end.join(lines)}")
    ),
    *(
        (
            "ID_UTF8ByteOrderMarkIsSkipped",
            (mark + rules("disallow: /").encode()).decode("utf-8", "replace"),
            "kite",
            *paths,
        )
        for mark, paths in (
            (b"\xef\xbb\xbf", ("", "/x")),
            (b"\xef\xbb", ("", "/x")),
            (b"\xef", ("", "/x")),
            (b"\xef\x11\xbf", ("/x", "")),  # the line is broken, and the rule outside a group
        )
    ),
    ("ID_UTF8ByteOrderMarkIsSkipped", rules("\ufeffdisallow: /"), "kite", "/x", ""),
    ("TestMaybeEscapePattern", rules("disallow: á", "disallow: /%aa"), "kite", "/", "/%AA"),
]


@pytest.mark.parametrize(("group", "text", "agent", "allowed", "refused"), ROWS)
def test_a_case_of_a_group(group, text, agent, allowed, refused):
    parsed = parse_robots(text, agent)
    answers = {
        path: parsed.allows(path) for path in (*allowed.split(" "), *refused.split(" ")) if path
    }
    assert answers == {path: path in allowed.split(" ") for path in answers}, group


LONG = "/x/" + "a" * (2083 * 8)
# robots.txt, path, whether bmforge allows it; Google's parser answers the opposite.
DIFFERENT = [
    (
        only("/a/山"),
        "/a/山",
        True,
    ),  # RFC 9309, 2.2.2: both sides are encoded before they are compared
    (only("/a/%62"), "/a/b", True),  # the same: escaped letters are equal to letters
    (rules(f"disallow: {LONG}/p"), f"{LONG}/q", True),  # lines are not cut after 16,663 bytes
    (only(f"{LONG}/p"), f"{LONG}/q", False),
]


@pytest.mark.parametrize(("text", "path", "allowed"), DIFFERENT)
def test_a_case_that_differs(text, path, allowed):
    assert parse_robots(text, "kite").allows(path) == allowed


@pytest.mark.parametrize("first", [True, False])
def test_a_sitemap_belongs_to_no_group(first):
    """Group ID_NonStandardLineExample_Sitemap."""
    lines = [rules("disallow: /1"), "user-agent: b\n\n"]
    lines.insert(0 if first else 2, "Sitemap: http://h/map.xml\n")
    assert parse_robots("".join(lines), "kite").sitemaps == ("http://h/map.xml",)


@pytest.mark.parametrize(
    ("address", "cleaned"),
    [
        ("http://h.org", "/"),
        ("http://h.org/", "/"),
        ("http://h.org/a/", "/a/"),
        ("http://h.org/a/b?c=http://d.e/", "/a/b?c=http://d.e/"),
        ("http://h.org/a/b?c=d&e=f#part", "/a/b?c=d&e=f"),
        ("http://h.org?a", "/?a"),
        ("http://h.org/a;b#c", "/a;b"),
    ],
)
def test_the_path_that_rules_are_compared_with(address, cleaned):
    """Group TestGetPathParamsQuery; bmforge requires the scheme of an address."""
    assert clean_url(address) == f"http://h.org{cleaned}"


# The situations of RFC 9309's examples, with other names: sections 2.2.2 and 2.2.3 (escapes and
# special characters), 5.1 (groups for two agents, and one without rules) and 5.2 (longest match).
SECTION_5_1 = """User-Agent: *
Disallow: *.gif$
Disallow: /drafts/
Allow: /prints/

User-Agent: heron
Disallow:/
Allow:/drafts/page.html
Allow:/allowed.gif

User-Agent: kite
User-Agent: owl
Disallow: /drafts/page.html

User-Agent: wren

EOF
"""
SECTION_5_2 = rules("Allow: /drafts/page/", "Disallow: /drafts/page/map.gif")
EXAMPLES = [
    (rules("disallow: /a?b=http%3A%2F%2Fh.org"), "kite", "/a?b=http", "/a?b=http://h.org"),
    (only("/山"), "kite", "/%E5%B1%B1", "/%E5"),
    (only("/%E5%B1%B1"), "kite", "/山 /%E5%B1%B1", "/"),
    (only("/%62%61%7A"), "kite", "/baz", "/ba"),
    (rules("disallow: /a-%2A.html"), "kite", "/a-b.html", "/a-*.html /a-%2A.html"),
    (rules("disallow: /a-%24"), "kite", "/a-", "/a-$ /a-%24"),
    (rules("allow: /this/*/exactly", "disallow: /"), "kite", "/this/a/exactly", "/this/exactly"),
    (rules("disallow: / # a comment", "# allow: /"), "kite", "", "/a"),
    (SECTION_5_1, "swift", "/prints/a /b.gif? /", "/b.gif /drafts/a"),
    (SECTION_5_1, "heron", "/drafts/page.html /allowed.gif", "/ /drafts/a /b.gif"),
    (SECTION_5_1, "kite", "/ /b.gif /drafts/a", "/drafts/page.html"),
    (SECTION_5_1, "owl", "/ /b.gif /drafts/a", "/drafts/page.html"),
    (SECTION_5_1, "wren", "/ /b.gif /drafts/page.html", ""),
    (SECTION_5_2, "kite", "/drafts/page/ /drafts/page/a.gif /x", "/drafts/page/map.gif"),
]


@pytest.mark.parametrize(("text", "agent", "allowed", "refused"), EXAMPLES)
def test_an_example_of_rfc_9309(text, agent, allowed, refused):
    test_a_case_of_a_group("RFC 9309", text, agent, allowed, refused)
