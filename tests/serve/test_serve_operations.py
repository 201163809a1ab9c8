"""Operation of a server: TLS, sockets, prefixes, origins, keys, failures and metrics."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_serve_sockets import until

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.serve.auth import KeysFile, load_keys
from bmforge.serve.idle_unloading import IdleUnloadingEngine
from bmforge.serve.lifecycle import EngineFailedError, bind_address, serve
from bmforge.serve.metrics import Metrics, TokenTimes
from bmforge.serve.settings import ServeConfig

FIRST, SECOND = "the-first-key-0123", "the-second-key-0123"


def ask(server: Any, client: Any = httpx, **fields: Any) -> httpx.Response:
    body = {"model": server.serving.name, "prompt": "a", "max_tokens": 3, **fields}
    return client.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_tls(start: Any, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=str(cert))
    with start(ssl_certfile=cert, ssl_keyfile=key) as server:
        with httpx.Client(verify=context) as client:
            found = client.get(f"https://localhost:{server.port}/health")
            assert found.json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no key")
    with pytest.raises(ConfigError, match="cannot be used"):
        bind_address(ServeConfig(ssl_certfile=cert, ssl_keyfile=wrong))
    with pytest.raises(ConfigError, match="must be given together"):
        ServeConfig(ssl_certfile=cert)


def test_a_unix_socket(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    config = ServeConfig(uds=path)
    bind_address(config).close()  # a server that was killed leaves its socket
    listener = bind_address(config)
    try:
        assert path.stat().st_mode & 0o077 == 0
        listener.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind_address(config)
    finally:
        listener.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen at"):
        bind_address(ServeConfig(uds=tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_prefix_that_the_proxy_strips_or_not(start: Any, prefix: str) -> None:
    with start(root_path="/llm", keys=FIRST) as server:
        url = server.url + prefix
        assert httpx.get(f"{url}/health").status_code == 200
        headers = {"authorization": f"Bearer {FIRST}"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        page = httpx.get(f"{url}/", headers=headers).text
        assert 'href="/' not in page
        assert 'src="/' not in page


@pytest.mark.parametrize("root", ["llm", "/llm/", "/"])
def test_prefixes_that_are_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="root_path"):
        ServeConfig(root_path=root)


def test_pages_of_allowed_origins(start: Any) -> None:
    ours, other = "https://chat.example.org", "https://evil.example"
    with start(allowed_origins=(ours,)) as server:
        asks = {"access-control-request-method": "POST"}
        found = httpx.options(f"{server.url}/v1/completions", headers={"origin": ours, **asks})
        assert found.status_code == 204
        assert found.headers["access-control-allow-origin"] == ours
        assert "authorization" in found.headers["access-control-allow-headers"]
        found = httpx.options(f"{server.url}/v1/completions", headers={"origin": other, **asks})
        assert "access-control-allow-origin" not in found.headers
        for origin, status in ((ours, 200), (other, 403)):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            with httpx.Client(headers=headers) as client:
                found = ask(server, client)
            assert found.status_code == status
            assert (found.headers.get("access-control-allow-origin") == origin) == (status == 200)
    for origin in ("chat.example.org", "https://a.b/path", "ftp://a.b", ""):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServeConfig(allowed_origins=(origin,))
    with pytest.raises(ConfigError, match="without API keys"):
        load_keys(ServeConfig(allowed_origins=("*",)), {})


def test_request_ids(start: Any) -> None:
    with start() as server:
        found = httpx.get(f"{server.url}/health", headers={"x-request-id": "mine.1"})
        assert found.headers["x-request-id"] == "mine.1"
        other = httpx.get(f"{server.url}/v1/else", headers={"x-request-id": "a b\tc"})
        assert other.headers["x-request-id"].startswith("req-")
        again = httpx.get(f"{server.url}/health")
        assert again.headers["x-request-id"] != other.headers["x-request-id"]


def test_keys_are_read_again(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FIRST)
    file.chmod(0o600)
    config = ServeConfig(keys_file=file)
    watched = KeysFile(config, {})
    assert watched.reread() is None
    file.write_text(f"{SECOND}\n")
    keys = watched.reread()
    assert keys is not None
    assert keys.find(f"Bearer {SECOND}")
    file.write_text("short")
    assert watched.reread() is None  # the former keys stay
    file.unlink()
    assert watched.reread() is None
    file.write_text(FIRST)
    with start(keys_file=file) as server:
        headers = {"authorization": f"Bearer {SECOND}"}
        url = f"{server.url}/v1/models"
        assert httpx.get(url, headers=headers).status_code == 401
        file.write_text(SECOND)
        assert until(lambda: httpx.get(url, headers=headers).status_code == 200)


class BrokenEngine(Engine):
    """An engine whose thread ends with an error in a call."""

    def break_down(self) -> None:
        def fail() -> None:
            raise SystemExit("broken")

        with pytest.raises(SystemExit):
            self.call(fail)


def test_a_dead_engine_ends_the_server(start: Any, model_directory: Path) -> None:
    with BrokenEngine(model_directory, config=EngineConfig(max_tokens=64)) as engine:
        with start(other=engine, place=model_directory) as server:
            assert httpx.get(f"{server.url}/health").status_code == 200
            engine.call(lambda: None)
            server.keep_open()
            engine.break_down()
            statuses = {path: httpx.get(f"{server.url}/{path}") for path in ("health", "ready")}
            assert [found.status_code for found in statuses.values()] == [503, 503]
            assert ask(server).status_code == 503
        config = ServeConfig(port=0, log_requests=False)
        with pytest.raises(EngineFailedError):  # which ends the command with an error status
            serve(engine, config, model_directory)


def test_a_model_that_cannot_be_loaded_again(start: Any, model_directory: Path) -> None:
    works, now = [True], [0.0]

    def open_engine() -> Engine:
        if not works[0]:
            raise OSError("the disk is gone")
        return Engine(model_directory, config=EngineConfig(max_tokens=64))

    asleep = IdleUnloadingEngine(open_engine, model_directory, 10.0, lambda: now[0])
    with asleep as engine, start(other=engine, place=model_directory) as server:
        now[0] = 20.0
        assert engine.unload_if_idle()
        works[0] = False
        assert ask(server).status_code == 503
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        works[0] = True
        assert ask(server).status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_times_of_tokens() -> None:
    """Against the times by hand: arrival 10, first step 11, tokens at 13 (2), 14 (1), 16 (2)."""
    from bmforge.infer.engine.request import OutputDelta

    clock = iter([13.0, 14.0, 16.0])
    metrics = Metrics()
    times = TokenTimes(metrics, 10.0, lambda: next(clock))
    times.note(0, [OutputDelta(0, "", (1, 2))], 11.0)
    times.note(0, [OutputDelta(0, "a", (3,))], 11.0)
    times.note(0, [OutputDelta(0, "b", (4, 5))], 11.0)
    values = sums(metrics)
    assert values["bmforge_queue_seconds_sum"] == 1.0
    assert values["bmforge_first_token_seconds_sum"] == 3.0
    assert values["bmforge_inter_token_seconds_sum"] == pytest.approx(3.0)
    assert values["bmforge_inter_token_seconds_count"] == 3.0


def sums(metrics: Metrics) -> dict[str, float]:
    from bmforge.infer.engine.request import RequestsStatus

    lines = metrics.write(RequestsStatus(0, 0, 0, 0), 0)[0].decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}


def test_tokens_are_counted_per_key_and_the_dashboard_reads_what_is_written(start: Any) -> None:
    with start(keys=f"{FIRST},{SECOND}") as server:
        for key, count in ((FIRST, 3), (SECOND, 5)):
            with httpx.Client(headers={"authorization": f"Bearer {key}"}) as client:
                assert ask(server, client, max_tokens=count, ignore_eos=True).status_code == 200
                text = client.get(f"{server.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("bmforge_key_tokens_total")]
        new = sorted(float(line.split()[-1]) for line in lines if 'kind="new"' in line)
        assert new == [3.0, 5.0]
        assert FIRST not in text
    written = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    dashboard = json.loads(Path("examples/serving/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 8
    for query in queries:
        for name in re.findall(r"bmforge_\w+", query):
            assert name in written, name
