"""Transcription of audio files, in OpenAI's format (`/v1/audio/transcriptions`)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bmforge.infer.audio import measure_audio
from bmforge.infer.engine.tasks import stepped_task
from bmforge.infer.speech import Transcriber, format_subtitles
from bmforge.serve.encoding import finish_task
from bmforge.serve.errors import RequestError
from bmforge.serve.http_json import GONE, StrictRoute
from bmforge.serve.live_requests import GoneError
from bmforge.serve.multipart import FormPart, parse_form
from bmforge.serve.serving import serving_of

__all__ = ["router"]

router = APIRouter(route_class=StrictRoute)
_FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_WITH_TIMES = ("verbose_json", "srt", "vtt")
_FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", "stream")
_GRANULARITIES = "timestamp_granularities[]"
_TEXT = {"type": "string"}
_BODY = {
    "type": "object",
    "required": ["file", "model"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        **dict.fromkeys(("model", "language", "prompt", "temperature"), _TEXT),
        "response_format": {"type": "string", "enum": list(_FORMATS)},
    },
}
_EXTRA = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _BODY}}}}


@router.post("/v1/audio/transcriptions", openapi_extra=_EXTRA)
async def transcribe(request: Request) -> Response:
    """Transcribe an audio file."""
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", openapi_extra=_EXTRA)
async def translate(request: Request) -> Response:
    """Translate an audio file to English text."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    body = await request.body()
    parts = parse_form(body, request.headers.get("content-type", ""))
    fields, file = _read_fields(parts)
    form = fields.get("response_format", "json")
    serving = serving_of(request)
    served = serving.find(fields["model"], "transcriptions")
    if serving.transcriber is None:
        raise RequestError(
            "the server cannot transcribe audio, because its model was loaded without an audio "
            "processor. Ask the operator to start the server with the directory of the model.",
            status=503,
        )
    options = _read_options(fields, task)
    run = partial(_transcribe, serving.transcriber, file, form in _WITH_TIMES, options)
    deadline_s = serving.config.timeouts.request_s
    submit = partial(served.engine.submit_task, stepped_task(run, deadline_s, served.delta))
    with serving.admit(request, served):
        try:
            result = await finish_task(serving, request, served.engine, submit)
        except GoneError:
            return Response(status_code=GONE)
    if form == "text":
        return PlainTextResponse(result["text"] + "\n")
    if form in ("srt", "vtt"):
        text = format_subtitles(result["segments"], form)
        media_type = "text/vtt" if form == "vtt" else "application/x-subrip"
        return Response(text, media_type=f"{media_type}; charset=utf-8")
    return JSONResponse({"task": task, **result} if form == "verbose_json" else result)


def _read_fields(parts: list[FormPart]) -> tuple[dict[str, str], io.BytesIO]:
    """Return the text fields of a form, and its audio file.

    Raises:
        RequestError: a field is missing, repeated, unknown or invalid.
    """
    fields: dict[str, str] = {}
    file: io.BytesIO | None = None
    for part in parts:
        if part.name not in (*_FIELDS, _GRANULARITIES):
            raise RequestError(
                f"the field {part.name[:80]!r} is not supported (supported: "
                f"{', '.join(_FIELDS)}). Leave it out.",
                part.name[:80],
            )
        if part.name in fields or (part.name == "file" and file is not None):
            raise RequestError(
                f"the field {part.name!r} occurs twice in the form. Send the field once.", part.name
            )
        if part.name == "file":
            file = io.BytesIO(part.value)
            file.name = part.filename or "audio"
        else:
            fields[part.name] = part.value.decode("utf-8", "replace")
    if file is None or "model" not in fields:
        name = "file" if file is None else "model"
        raise RequestError(f"the field {name!r} is missing in the form. Add the field.", name)
    allowed: Mapping[str, tuple[str, ...]] = {
        "response_format": _FORMATS,
        "stream": ("false", "False"),
        _GRANULARITIES: ("segment",),
    }
    for name, values in allowed.items():
        if fields.get(name, values[0]) not in values:
            raise RequestError(
                f"{name}={fields[name][:80]!r} is not supported (supported: "
                f"{', '.join(values)}). Use a supported value.",
                name,
            )
    if _GRANULARITIES in fields and fields.get("response_format") != "verbose_json":
        raise RequestError(
            f"{_GRANULARITIES} is allowed only with response_format='verbose_json'. Set "
            "response_format, or leave the field out.",
            _GRANULARITIES,
        )
    return fields, file


def _read_options(fields: Mapping[str, str], task: str) -> dict[str, Any]:
    """Return the options of `Transcriber.generate` that a request sets."""
    options: dict[str, Any] = {}
    if task != "transcribe":
        options["task"] = task
    options |= {name: fields[name] for name in ("language", "prompt") if fields.get(name)}
    try:
        temperature = float(fields.get("temperature") or 0)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise RequestError(
            f"temperature={fields['temperature'][:80]!r} is not a number from 0 to 1. Correct "
            "the value.",
            "temperature",
        )
    return options | ({"do_sample": True, "temperature": temperature} if temperature else {})


def _transcribe(
    transcriber: Transcriber,
    file: io.BytesIO,
    has_times: bool,
    options: Mapping[str, Any],
    model: Any,
) -> dict[str, Any]:
    """Return the fields of a response."""
    if not has_times:
        return {"text": transcriber.transcribe(model, file, **options)}
    segments, language = transcriber.segments(model, file, **options)
    file.seek(0)
    count, rate = measure_audio(file)  # the file was read, so both are positive
    temperature = options.get("temperature", 0.0)
    return {
        "language": language or "en",
        "duration": count / rate,
        "text": " ".join(segment["text"] for segment in segments).strip(),
        "segments": [
            {"id": number, "temperature": temperature, **segment}
            for number, segment in enumerate(segments)
        ],
    }
