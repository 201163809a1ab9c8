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
    *("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "sk-abcdefghijklmnopqrstuvwxyzABCDEFGH"),
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
# Numbers that only their surroundings tell from an address, a key, a card or a mail address.
VERSIONS = (
    *("version 9.0.22.1", "Version: 9.0.22.1", "v9.0.22.1", "Ver. 9.0.22.1", "rev9.0.22.1"),
    *("release 11.2.0.4", "Oracle 11.2.0.4", "Oracle Database 12.1.0.2", "build 9.3.1.7"),
    *("firmware (9.8.7.6)", "driver version is 9.8.7.6", "upgraded from 9.8.7.6 to 9.8.7.7"),
    *("versions 9.8.7.6, 9.8.7.7 and 9.8.7.8", "the 9.8.7.6 release", "Opera/9.8.1.2 (X11)"),
    *("get tool-9.8.7.6.tar.gz", "tool_9.8.7.6_amd64.deb", "9.8.7.6-rc1", "9.8.7.6b2"),
    *("section 3.2.1.4", "Sect. 3.2.1.4", "§3.2.1.4", "§ 3.2.1.4", "clause 3.2.1.4", "EC 3.4.21.4"),
    *(
        "OID 1.3.6.1",
        "版本9.8.7.6",
        "版本号：9.8.7.6",
        "升级到9.8.7.6",
        "第3.2.1.4节",
        "见第 3.2.1.4 条",
    ),
    *("3.2.1 Masks\n3.2.1.4 Rules\nThe rules of 3.2.1.4 apply.", "## 3.2.1 Masks\n(see 3.2.1.4)"),
    *("3.2.1.1 Scope\n3.2.1.2 Terms\nThe terms of 3.2.1.2 apply.", "3.2 Masks\n\n3.2.1.4 Rules"),
    *("Kapitel 3.2.1.4", "appendix 3.2.1.4", "JDK 9.0.4.1", "Chrome 9.8.7.6", "kernel 4.4.0.21"),
)
ALIKE = (
    *("token: AuthenticationTokenProvider", "password = resetPasswordLinkFromMail", "logo@2x.png"),
    *("on 2023051512345674", "dead::beef", "add::fade::bad", "MAC 00:1B:44:11:3A:B7", "2001::f()"),
)
IN_CONTEXT = (
    *(("SSN 078-05-1120", "SSN <SSN>"), ("ssn: 078051120.", "ssn: <SSN>.")),
    *(
        ("SSN# 219-09-9998", "SSN# <SSN>"),
        ("Social Security No. 219-09-9998", "Social Security No. <SSN>"),
    ),
    *(
        ("password = Xy12Zw34Ab56Cd78", "password = <KEY>"),
        ("token='aBcDeFgHiJkLmNoP'", "token='<KEY>'"),
    ),
    *(("server 8.8.8.8 runs version 9.8.7.6", "server <IP> runs version 9.8.7.6"),),
    *(("version 1.2.3 on 8.8.8.8", "version 1.2.3 on <IP>"), ("IP8.8.8.8", "IP<IP>")),
    *(("for example 8.8.8.8", "for example <IP>"), ("version 8.8.8.8:53", "version <IP>:53")),
    *(("8.8.8.8节点", "<IP>节点"), ("列表8.8.8.8", "列表<IP>"), ("8.8.8.8and", "<IP>and")),
    *(("dns/8.8.8.8", "dns/<IP>"), ("from 8.8.8.8, 8.8.4.4", "from <IP>, <IP>")),
    *(
        ("see.8.8.8.8", "see.<IP>"),
        ("http://8.8.8.8/a", "http://<IP>/a"),
        ("8.8.8.8/24", "<IP>/24"),
    ),
    *(("8.8.8.8.So", "<IP>.So"), ("8.8.8.8-8.8.4.4", "<IP>-<IP>")),
    *(
        ("2a00:1450::1", "<IP>"),
        ("3.2.1.4 Rules", "<IP> Rules"),
        ("8.8.8.8\n8.8.4.4", "<IP>\n<IP>"),
    ),
    *(
        ("4.2.2.1 dns1\n4.2.2.2 dns2", "<IP> dns1\n<IP> dns2"),
        ("8.8.8.8 A\n8.8.8.9 B", "<IP> A\n<IP> B"),
    ),
    *(("8.8 million users\n8.8.8.8 Google", "8.8 million users\n<IP> Google"),),
    *(("IBAN DE89 3704 0044 0532 0130 00 BIC X", "IBAN <IBAN> BIC X"), ("root@8.8.8.8", "<EMAIL>")),
    *(("GB29 NWBK 6016 1331 9268 19 AND", "<IBAN> AND"), ("root@[8.8.8.8]", "<EMAIL>")),
    *(("name@example.org1", "<EMAIL>1"), ("138\u00a01234\u00a05678", "<PHONE>")),
    *(("4111\u20111111\u20111111\u20111111", "<BANK_CARD>"), ("008613812345678", "<PHONE>")),
    *(("٤١١١ ١١١١ ١١١١ ١١١١", "<BANK_CARD>"), ("2223 0031 2200 3222", "<BANK_CARD>")),
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


@pytest.mark.parametrize("text", [*SOUND, *VERSIONS, *ALIKE])
def test_text_that_looks_alike_stays(text):
    assert MaskPrivate()(Document(text, "x")).text == text


@pytest.mark.parametrize(("text", "masked"), IN_CONTEXT)
def test_only_the_private_data_itself_is_replaced(text, masked):
    assert mask(text) == masked


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
