"""Keys, and from where a server may be called without one."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from bmforge.errors import ConfigError
from bmforge.serve.auth import ApiKeys, check_origin, load_keys
from bmforge.serve.errors import RequestError
from bmforge.serve.settings import ServeConfig

KEY, OTHER = "a-key-of-this-server", "another-key-of-this-server"


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_keys_are_told_apart() -> None:
    keys = ApiKeys([KEY, OTHER])
    first, second = keys.find(f"Bearer {KEY}"), keys.find(f"bearer  {OTHER} ")
    assert first != second
    assert keys.find(basic(f"somebody:{KEY}")) == first
    assert KEY not in str(vars(keys))
    assert KEY not in first


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Basic %%%",
     basic(KEY), basic(f"{KEY}:"), "Basic /////w==", f"Digest {KEY}", "Bearer \udc80"],
)  # fmt: skip
def test_wrong_keys(header: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        ApiKeys([KEY]).find(header)
    assert caught.value.status_code == 401
    assert "Basic" in caught.value.headers["www-authenticate"]  # type: ignore[index]


@pytest.mark.parametrize("text", ["short", "with a space in the middle", "schlüssel-mit-umlaut"])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ConfigError, match="key 1 of 1 is not valid") as caught:
        ApiKeys([text])
    assert text not in str(caught.value)


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n")
    keys = load_keys(ServeConfig(keys_file=file), {"BMFORGE_API_KEYS": f"{OTHER}, "})
    assert len(keys) == 2
    assert len(load_keys(ServeConfig(), {})) == 0
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="contains no key"):
        load_keys(ServeConfig(keys_file=file), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_others_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="lets other machines send requests"):
        load_keys(ServeConfig(host=host), {})
    load_keys(ServeConfig(host=host), {"BMFORGE_API_KEYS": KEY})
    load_keys(ServeConfig(host=host, allow_no_key=True), {})
    with pytest.raises(ConfigError, match="cannot be used with keys"):
        load_keys(ServeConfig(host=host, allow_no_key=True), {"BMFORGE_API_KEYS": KEY})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_needs_none(host: str) -> None:
    assert len(load_keys(ServeConfig(host=host), {})) == 0


def is_let_in(method: str, has_keys: bool = False, config: Any = None, **headers: str) -> bool:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        check_origin(config or ServeConfig(), has_keys, method, given)
    except RequestError as error:
        return error.status_code != 403
    return True


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:80", "::1"])
def test_own_names(host: str) -> None:
    assert is_let_in("GET", host=host) == (host != "::1")  # which has no place for a port


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil:80",
     "localhost:80:80", "10.0.0.1", "local host", "localhost/", "[::1", "0x7f.1", "127.1"],
)  # fmt: skip
def test_other_names_are_refused_without_a_key(host: str) -> None:
    assert not is_let_in("GET", host=host)
    assert is_let_in("GET", has_keys=True, host=host)


def test_names_that_were_allowed() -> None:
    everywhere = ServeConfig(host="0.0.0.0", allow_no_key=True, allow_hosts=("box.lan",))
    assert is_let_in("GET", config=everywhere, host="box.lan:8000")
    assert is_let_in("GET", config=everywhere, host="192.168.1.2:8000")
    assert not is_let_in("GET", config=everywhere, host="evil.example")


def test_pages_from_elsewhere_may_not_ask() -> None:
    own = {"host": "localhost:8000"}
    assert is_let_in("POST", **own)
    assert is_let_in("POST", origin="http://localhost:8000", **own)
    assert is_let_in("POST", sec_fetch_site="same-origin", origin="https://proxy.example", **own)
    for keys in (False, True):
        assert not is_let_in("POST", keys, origin="http://evil.example", **own)
        assert not is_let_in("POST", keys, origin="null", **own)
        assert not is_let_in("POST", keys, origin="http://localhost:9", **own)
        assert not is_let_in("POST", keys, sec_fetch_site="cross-site", **own)
        assert not is_let_in("POST", keys, sec_fetch_site="same-site", **own)
        assert is_let_in("GET", keys, sec_fetch_site="cross-site", **own)


@pytest.mark.parametrize(
    "fields",
    [{"port": -1}, {"port": 70000}, {"host": ""}, {"receive_s": 0}, {"max_body_bytes": 0},
     {"grace_s": -1}, {"request_s": float("inf")}, {"request_s": float("nan")}, {"name": " "},
     {"max_requests": 4, "max_requests_per_key": 5}],
)  # fmt: skip
def test_settings_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ServeConfig(**fields)


def test_no_key_and_a_file_of_keys() -> None:
    with pytest.raises(ConfigError, match="cannot be used together"):
        ServeConfig(allow_no_key=True, keys_file=Path("keys"))
