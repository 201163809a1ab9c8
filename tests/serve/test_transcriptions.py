"""Transcription requests: answers equal those of transformers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from speech_models import write_audio, write_speech_model

from bmforge.infer import Engine, EngineConfig
from bmforge.infer.speech import Transcriber, format_subtitles
from bmforge.models import AutoModel
from bmforge.serve.errors import RequestError
from bmforge.serve.multipart import FormPart, parse_form
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.delta import Lora, use_deltas

pytest.importorskip("transformers")

FORM = "multipart/form-data; boundary=a"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech_model(tmp_path_factory.mktemp("served") / "whisper")


@pytest.fixture(scope="module")
def speech(directory: Path) -> Iterator[Engine]:
    with Engine(directory, config=EngineConfig(max_tokens=64)) as engine:
        yield engine


def test_answers_of_all_formats(
    start: Any, speech: Engine, directory: Path, tmp_path: Path
) -> None:
    """`Transcriber` has the tokens of transformers' generate; see tests/infer/test_speech.py."""
    audio = write_audio(tmp_path / "a.wav", 0.7)
    model, transcriber = AutoModel.from_pretrained(directory).eval(), Transcriber(directory)
    with start(other=speech, place=directory) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        name = server.serving.name
        create: Any = client.audio.transcriptions.create
        for options in ({}, {"language": "de"}):
            wanted = transcriber.transcribe(model, audio, **options)
            with audio.open("rb") as file:
                assert create(model=name, file=file, **options).text == wanted
            with audio.open("rb") as file:
                text = create(model=name, file=file, response_format="text", **options)
                assert text.strip() == wanted
        with audio.open("rb") as file:
            more = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
            answer = create(model=name, file=file, language="en", **more)
        segments, language = transcriber.segments(model, audio, language="en")
        for kind in ("srt", "vtt"):
            with audio.open("rb") as file:
                text = create(model=name, file=file, language="en", response_format=kind)
            assert text == format_subtitles(segments, kind)
        wanted = transcriber.transcribe(model, audio, language="en", prompt="Zoe")
        with audio.open("rb") as file:
            assert create(model=name, file=file, language="en", prompt="Zoe").text == wanted
        assert (answer.language, language, answer.duration) == ("en", "en", pytest.approx(0.7))
        assert [(s.start, s.end, s.text) for s in answer.segments] == [
            (s["start"], s["end"], s["text"]) for s in segments
        ]
        wanted = transcriber.transcribe(model, audio, task="translate", language="en")
        with audio.open("rb") as file:
            body = {"model": name, "language": "en"}
            url = f"{server.url}/v1/audio/translations"
            response = httpx.post(url, data=body, files={"file": file}, timeout=60)
        assert response.json() == {"text": wanted}


def test_an_adapter_is_a_model_of_its_own(start: Any, directory: Path, tmp_path: Path) -> None:
    audio = write_audio(tmp_path / "a.wav", 0.7)
    model, transcriber = AutoModel.from_pretrained(directory).eval(), Transcriber(directory)
    base = transcriber.transcribe(model, audio, language="en")
    lora = Lora(model, targets=["all-linear"], rank=2, name="tuned")
    for part in lora.parameters():
        torch.nn.init.normal_(part, 0, 0.5, generator=torch.Generator().manual_seed(0))
    tuned = transcriber.transcribe(model, audio, language="en")
    assert tuned != base
    use_deltas(model, ())  # only requests that name the adapter use it
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with (
        Engine(model, tokenizer=tokenizer, config=EngineConfig(max_tokens=64)) as engine,
        start(other=engine, place=directory, deltas={"fine": "tuned"}) as server,
    ):
        for name, wanted in ((server.serving.name, base), ("fine", tuned)):
            response = httpx.post(
                f"{server.url}/v1/audio/transcriptions",
                data={"model": name, "language": "en"},
                files={"file": ("a.wav", audio.read_bytes())},
                timeout=60,
            )
            assert response.json() == {"text": wanted}


def test_what_is_refused(start: Any, speech: Engine, directory: Path, tmp_path: Path) -> None:
    audio = write_audio(tmp_path / "a.wav", 0.2).read_bytes()
    cases: list[tuple[dict[str, str], bytes, str]] = [
        ({"chunking_strategy": "auto"}, audio, "the field 'chunking_strategy' is not supported"),
        ({"response_format": "sbv"}, audio, "response_format='sbv' is not supported"),
        ({"prompt": "<|en|>"}, audio, "<|en|>"),
        ({"stream": "true"}, audio, "stream='true' is not supported"),
        ({"temperature": "hot"}, audio, "temperature='hot' is not a number"),
        ({"timestamp_granularities[]": "word"}, audio, "supported: segment"),
        ({"timestamp_granularities[]": "segment"}, audio, "is allowed only with response_format"),
        ({"model": "other"}, audio, "unknown model 'other'"),
        ({"language": "klingon"}, audio, "klingon"),
        ({}, b"no audio", "cannot read the audio file 'a.wav'"),
    ]
    with start(other=speech, place=directory) as server:
        url = f"{server.url}/v1/audio/transcriptions"
        for fields, data, problem in cases:
            body = {"model": server.serving.name, **fields}
            response = httpx.post(url, data=body, files={"file": ("a.wav", data)}, timeout=60)
            assert response.status_code in (400, 404), response.text
            assert problem in response.json()["error"]["message"]
        response = httpx.post(url, json={"model": "a"}, timeout=60)
        assert response.status_code == 415
        chat = {"model": server.serving.name, "messages": [{"role": "user", "content": "a"}]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
        assert "supported: transcriptions" in response.json()["error"]["message"]


def test_a_model_of_text_refuses_audio(start: Any) -> None:
    with start() as server:
        url, body = f"{server.url}/v1/audio/transcriptions", {"model": server.serving.name}
        response = httpx.post(url, data=body, files={"file": ("a.wav", b"RIFF")}, timeout=60)
        assert "does not support transcriptions" in response.json()["error"]["message"]


def test_forms_are_parsed_as_httpx_writes_them() -> None:
    """Contents may have any bytes, such as line ends and parts of the boundary."""
    data = b"\r\n--a\r\n\0\xff--" + bytes(range(256))
    files = {"file": ('größe "1".wav', data, "audio/wav")}
    request = httpx.Request("POST", "http://a", data={"model": "m", "prompt": "é"}, files=files)
    parts = parse_form(request.read(), request.headers["content-type"])
    assert [(p.name, p.value) for p in parts] == [
        ("model", b"m"), ("prompt", "é".encode()), ("file", data),
    ]  # fmt: skip
    assert parts[2].filename is not None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", FORM),
        (b"--a\r\nContent-Disposition: form-data; name=b\r\n\r\nc", FORM),
        (b"--a\r\nContent-Disposition: form-data\r\n\r\nc\r\n--a--", FORM),
        (b"--a\r\nc\r\n--a--", FORM),
        (b"--a--", "multipart/form-data"),
        (b"{}", "application/json"),
        (b"a=b", "application/x-www-form-urlencoded"),
    ],
)  # fmt: skip
def test_incomplete_forms_are_refused(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError):
        parse_form(body, kind)


def test_a_form_of_curl() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    assert parse_form(body, 'multipart/form-data; boundary="x"') == [FormPart("model", b"m")]
