"""Chat requests with images: answers, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from vision_models import make_image, write_vision_model

from bmforge.infer import Engine, EngineConfig

transformers = pytest.importorskip("transformers")

IMAGES = [make_image(40, 30, 1), make_image(31, 62, 2)]


def uri(image: Any, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def said(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("served") / request.param, request.param)


@pytest.fixture(scope="module")
def vision(directory: Path) -> Iterator[Engine]:
    with Engine(directory, config=EngineConfig(max_tokens=256)) as engine:
        yield engine


def answer_of_transformers(directory: Path, parts: list[Any], images: list[Any]) -> str:
    """Return the answer of transformers to a user message."""
    from bmforge.infer.processor import find_processor
    from bmforge.tokenizers.chat_template import find_template

    ours = find_processor(directory)
    assert ours is not None
    processor = ours._processor
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=find_template(directory),
        add_generation_prompt=True,
    )
    inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt")
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=[2, 4])
    ids = out[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(ids, skip_special_tokens=True))


def test_answers_are_those_of_transformers(start: Any, vision: Engine, directory: Path) -> None:
    """Requests with and without images run together and have the answers that they have alone."""
    talks = [
        ([part(uri(IMAGES[0])), "What is this?"], IMAGES[:1]),
        (["Which one, ", part(uri(IMAGES[0]), detail="auto"), part(uri(IMAGES[1]))], IMAGES),
        (["Just a text"], []),
    ]
    shown = [
        [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        for parts, _ in talks
    ]
    wanted = [
        answer_of_transformers(directory, parts, images)
        for parts, (_, images) in zip(shown, talks, strict=True)
    ]
    with start(other=vision, place=directory) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def ask(number: int) -> Any:
            return client.chat.completions.create(
                model=server.serving.name,
                messages=said(*talks[number][0]),  # type: ignore[arg-type]
                max_tokens=8,
                temperature=0,
                extra_body={"skip_special_tokens": True},
            )

        with ThreadPoolExecutor(6) as pool:
            for number, answer in zip([0, 1, 2] * 2, pool.map(ask, [0, 1, 2] * 2), strict=True):
                assert answer.choices[0].message.content == wanted[number], number
                assert answer.usage.prompt_tokens_details.cached_tokens == 0
        stream = client.chat.completions.create(
            model=server.serving.name,
            messages=said(*talks[0][0]),
            max_tokens=8,
            temperature=0,
            stream=True,
            extra_body={"skip_special_tokens": True},
        )  # type: ignore[call-overload]
        assert "".join(c.choices[0].delta.content or "" for c in stream) == wanted[0]


def test_all_interfaces_read_the_same_images(start: Any, vision: Engine, directory: Path) -> None:
    """Responses and Anthropic's messages have the answer and the tokens of the chat completion."""
    urls = [uri(image, form) for image, form in zip(IMAGES, ("PNG", "JPEG"), strict=True)]
    texts = "Which one, ", "or this?"
    chat = said(texts[0], part(urls[0]), part(urls[1]), texts[1])
    item = [
        {"type": "input_text", "text": texts[0]},
        *({"type": "input_image", "image_url": url, "detail": "auto"} for url in urls),
        {"type": "input_text", "text": texts[1]},
    ]
    sources = [url.removeprefix("data:").split(";base64,") for url in urls]
    block = [
        {"type": "text", "text": texts[0]},
        *(
            {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
            for kind, data in sources
        ),
        {"type": "text", "text": texts[1]},
    ]
    with start(other=vision, place=directory) as server:

        def post(path: str, **body: Any) -> dict[str, Any]:
            body |= {"model": server.serving.name, "temperature": 0}
            response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        want = post("/v1/chat/completions", messages=chat, max_tokens=8)
        counted = want["usage"]["prompt_tokens"]
        response = post(
            "/v1/responses", input=[{"role": "user", "content": item}], max_output_tokens=8
        )
        message = post("/v1/messages", messages=[{"role": "user", "content": block}], max_tokens=8)
        text = want["choices"][0]["message"]["content"]
        assert [p["text"] for o in response["output"] for p in o["content"]] == [text]
        assert [b["text"] for b in message["content"]] == [text]
        assert response["usage"]["input_tokens"] == message["usage"]["input_tokens"] == counted
        body = {"model": server.serving.name, "messages": [{"role": "user", "content": block}]}
        tokens = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, timeout=60).json()
        assert tokens["input_tokens"] == counted


def test_refused_images_are_named_by_each_interface(
    start: Any, vision: Engine, directory: Path
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    linked = {"type": "url", "url": "https://a.org/b.png"}
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("responses", {"image_url": "https://a.org/b.png"}, "input", "not fetched"),
        ("responses", {"image_url": "data:image/png;base64,AAAA"}, "input", "cannot be read"),
        ("responses", {"file_id": "f"}, "input.0.content.0.image_url", "equired"),
        ("messages", {"source": source}, "messages", "cannot be read"),
        ("messages", {"source": linked}, "messages", "not fetched"),
    ]
    with start(other=vision, place=directory) as server:
        for path, image, field, problem in cases:
            kind = {"responses": "input_image", "messages": "image"}[path]
            messages = [{"role": "user", "content": [{"type": kind, **image}]}]
            body: dict[str, Any] = {"model": server.serving.name}
            body |= {"input": messages} if path == "responses" else {"messages": messages}
            body |= {} if path == "responses" else {"max_tokens": 2, "system": "a"}
            response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
            assert response.status_code == 400, response.text
            assert problem in response.text
            assert field in response.text
            assert "image_url.url" not in response.text


def refusal(server: Any, messages: Any) -> dict[str, Any]:
    body = {"model": server.serving.name, "messages": messages, "max_tokens": 2}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_images_that_are_refused(start: Any, vision: Engine, directory: Path) -> None:
    image = uri(IMAGES[0])
    before = {"role": "user", "content": "a"}
    cases = [
        (said(part("https://example.org/a.png")), "messages.0.content", "not fetched"),
        ([before, *said(part("file:///etc/passwd"))], "messages.1.content", "not fetched"),
        (said(part("data:image/png;base64,AAAA")), "messages.0.content", "cannot be read"),
        (said(part(uri(Image.new("RGB", (300, 300))))), "messages.0.content", "pixels"),
        (said(*[part(image)] * 3), "messages", "contains 3 images"),
        (said(part(image, detail="low")), "messages.0.content.0.image_url.detail", "'high'"),
        (said({"type": "image_url"}), "messages.0.content.0.image_url", "required"),
        (said({"type": "text"}), "messages.0.content.0.text", "required"),
        (said({"type": "input_audio"}), "messages.0.content", "unsupported type"),
        ([{"role": "system", "content": said(part(image))[0]["content"]}], "messages", "role user"),
        (said(part(image), "<image><|image_pad|>" * 200), "messages", "accepts at most"),
    ]
    with start(other=vision, place=directory, max_images=2, max_image_pixels=80_000) as server:
        for messages, field, problem in cases:
            error = refusal(server, messages)
            assert problem in error["message"], error
            assert error["param"] is None or error["param"].startswith(field.split(".")[0])
            if "." in field:
                assert error["param"] == field


def test_names_of_image_tokens_in_a_text_are_text(
    start: Any, vision: Engine, directory: Path
) -> None:
    """A client cannot write image tokens itself."""
    names = "<image> <|image_pad|> <|vision_start|>"
    with start(other=vision, place=directory) as server:

        def count(text: str) -> list[int]:
            body = {"messages": said(part(uri(IMAGES[0])), text)}
            response = httpx.post(f"{server.url}/tokenize", json=body, timeout=60)
            tokens = response.json()["tokens"]
            return [tokens.count(vision.tokenizer.token_to_id(name)) for name in names.split()]

        assert count(names) == count("a")


def test_a_model_of_text_refuses_images(start: Any) -> None:
    with start() as server:
        error = refusal(server, said(part(uri(IMAGES[0])), "a"))
        assert error["param"] == "messages.0.content"
        assert "supports only text" in error["message"]
