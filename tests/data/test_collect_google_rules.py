"""robots.txt: own rows for each group of cases in Google's test set (github.com/google/robotstxt).

The group names are those of its robots_test.cc. The cases where bmforge differs are in `DIFFERENT`
and in docs/guides/collecting.md.
"""

from __future__ import annotations

import pytest

from bmforge.data.collect.robots import parse_robots
from bmforge.data.collect.run import clean_url

_GROUPS = "allow: /out/\n\nuser-agent: a\ndisallow: /\nallow: /1/\nuser-agent: b\ndisallow: /\n"
GROUPS = f"{_GROUPS}allow: /2/\n\n\nallow: /3/\nuser-agent: c\n\nuser-agent: a\nallow: /4/\n"
GROUPS += "disallow: /\n"
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
    assert clean_url(address) == f"http://h.org{cleaned}"
