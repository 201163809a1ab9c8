"""Private data in some hundred forms, against datatrove's masks, and text that looks alike."""

from __future__ import annotations

import itertools
import random

import pytest

from bmforge.data.clean.private import MaskPrivate, is_iban
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError

REGIONS = ("US", "DE", "GB")
MAILS = (
    *("name@example.org", "_under@example.org", "first.last+tag@mail.example.co.uk", "a_b@x.io"),
    *("USER@EXAMPLE.ORG", "n%me@example.org", "o'neil@example.org", "x@sub.sub.example.museum"),
    *("name@xn--bcher-kva.example", "1234@qq.com", "a-b@c-d.org"),
)
ADDRESSES = (
    *("8.8.8.8", "1.1.1.1", "203.0.114.7", "2001:4860:4860::8888", "::ffff:8.8.8.8"),
    *("2606:4700:4700:0:0:0:0:1111",),
)
AROUND = ("{}", "mail {}, please", "({})", "<{}>", "{}-and more", "x: {}.", "“{}”", "联系{}吧")
PORTS = ("{}:53", "ip:{}", "http://{}/", "[{}]", "{},", "{};")
KEYS = (
    *(
        "AKIAIOSFODNN7EXAMPL3",
        "ghp_abcdEFGH1234567890abcdEFGH1234567890",
        "hf_abcdEFGH12345678abcdEFGH12345678",
    ),
    *(
        "github_pat_11ABCDEFG0abcdefghij_klmnop",
        "glpat-abcdEFGH1234567890ab",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    ),
    *("xoxb-1234567890-abcdefghij", "sk-proj-abcdEFGH1234567890abcd", "sk_live_abcdEFGH12345678"),
    *("npm_abcdEFGH12345678abcdEFGH12345678abcd", "SG.abcdEFGH12345678.abcdEFGH12345678ABCD"),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdEFGH1234", "password = Xy12Zw34Ab56Cd78"),
)
NUMBERS = (
    *(
        "13812345678",
        "+86 138 1234 5678",
        "010-62781234",
        "(010)62781234",
        "（010）62781234",
        "400-123-4567",
    ),
    *(
        "手机号：１３８１２３４５６７８",
        "(415) 555-2671",
        "+1 415 555 2671",
        "+49 30 901820",
        "+44 20 7946 0958",
    ),
    *("SSN 078-05-1120", "078-05-1120", "social security number: 219-09-9998"),
    *(
        "4111 1111 1111 1111",
        "4111111111111111",
        "5500-0000-0000-0004",
        "3782 822463 10005",
        "378282246310005",
    ),
    *("IBAN DE89 3704 0044 0532 0130 00", "DE89370400440532013000", "GB29 NWBK 6016 1331 9268 19"),
    *("FR14 2004 1010 0505 0001 3M02 606", "11010519491231002X", "京A12345", "粤B·D12345"),
)
SOUND = (
    *("version 1.2.3.4.5", "192.168.0.1", "10.0.0.1:80", "127.0.0.1", "in 1999-2000 they", "::1"),
    *("the ratio 16:9:4", "12:30:45", "std::vector", "a::b", "$1,234,567.89"),
    *(
        "ISBN 978-3-16-148410-0",
        "4111 1111 1111 1112",
        "DE89 3704 0044 0532 0130 01",
        "000-12-3456",
    ),
    *("666-12-3456", "order 078-05-11201", "@name", "name@", "user @ example", "2024-05-01"),
    *("hf_short", "sk-learn", "password: none", "1234567890123456", "CSS2 2D3D 4x4"),
)


def mask(text: str) -> str:
    found = MaskPrivate(regions=REGIONS)(Document(text, "x"))
    assert isinstance(found, Document)
    return found.text


CASES = [
    *((one, shape) for one, shape in itertools.product(MAILS, AROUND)),
    *((one, shape) for one, shape in itertools.product(ADDRESSES, (*AROUND[:4], *PORTS[1:]))),
    *((one, "{}:53") for one in ADDRESSES[:3]),
    *((one, shape) for one, shape in itertools.product((*KEYS, *NUMBERS), ("{}", "see {}, here"))),
]


@pytest.mark.parametrize(("private", "shape"), CASES)
def test_private_data_is_masked(private, shape):
    text = shape.format(private)
    assert "<" in mask(text).replace(text, "")
    digits = [part for part in private.replace("@", " ").split() if len(part) > 6]
    assert not any(part in mask(text) for part in digits[-1:])


@pytest.mark.parametrize("text", SOUND)
def test_text_that_looks_alike_stays(text):
    assert MaskPrivate()(Document(text, "x")).text == text


@pytest.mark.parametrize("seed", range(10))
def test_never_behind_datatrove(seed):
    """All addresses that datatrove masks are masked, in random text."""
    formatters = pytest.importorskip("datatrove.pipeline.formatters")
    theirs = formatters.PIIFormatter(email_replacement="<EMAIL>", ip_replacement="<IP>")
    draw = random.Random(seed)
    for _ in range(40):
        words = [draw.choice((*MAILS, *ADDRESSES[:3], "word", "and", "中文")) for _ in range(6)]
        marks = [
            draw.choice((" ", ", ", "; ", ":", "-", "_ ", "/", ">", "\n", "(", ")")) for _ in words
        ]
        text = "".join(word + mark for word, mark in zip(words, marks, strict=True))
        masked = theirs.format(text)
        ours = mask(text)
        for word in {*MAILS, *ADDRESSES[:3]}:
            if word in text and word not in masked:
                assert word not in ours, (text, masked, ours)


def test_masking_takes_linear_work():
    """The pieces found are kept sorted; each is compared with its two neighbors alone."""
    text = " ".join(f"p{n}@example.org 8.8.{n % 200}.8" for n in range(20_000))
    assert mask(text).count("<EMAIL>") == 20_000


def test_ibans_are_checked_by_their_digits():
    """A changed digit makes any number wrong: MOD 97 finds every single error."""
    number = "DE89370400440532013000"
    assert is_iban(number)
    for at in range(2, len(number)):
        other = number[:at] + str((int(number[at]) + 1) % 10) + number[at + 1 :]
        assert not is_iban(other)


def test_an_unknown_region_is_refused():
    with pytest.raises(ConfigError, match="contains 'XX'"):
        MaskPrivate(regions=("XX",))
