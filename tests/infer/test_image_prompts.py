"""Prompts with images: tokens and logits equal those of transformers' `generate`."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from more_vision_models import MORE_KINDS, build_vision_model
from PIL import Image
from torch import Tensor
from vision_models import KINDS, make_image, save_random, write_vision_model

from bmforge.errors import BmforgeError, ConfigError, DataError
from bmforge.infer import Engine, Request, generate
from bmforge.infer.images import read_data_uri, read_image
from bmforge.infer.options import GenerationConfig
from bmforge.infer.processor import Processor, find_processor
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tune.delta import Lora

transformers = pytest.importorskip("transformers")

IMAGES = [make_image(40, 30, 1), make_image(31, 62, 2), make_image(28, 28, 3)]


class Opened:
    """A tiny model as bmforge and as transformers opens it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ours = AutoModel.from_pretrained(directory).eval()
        self.plain = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
        self.plain.generation_config.eos_token_id = None
        processor = find_processor(directory)
        assert processor is not None
        self.processor: Processor = processor
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.template = ChatTemplate(find_template(directory), self.tokenizer)

    def text(self, *parts: Any) -> str:
        """Return a user message as a prompt; a number is an image."""
        content = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
        ]
        return self.template.encode([{"role": "user", "content": content}])[0]

    def batch(self, *prompts: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return the inputs of several prompts; a number is the index of an image."""
        images = [[IMAGES[p] for p in parts if isinstance(p, int)] for parts in prompts]
        return self.processor.encode_batch([self.text(*parts) for parts in prompts], images)

    def generate(self, batch: dict[str, Tensor], **options: Any) -> Tensor:
        """Return what transformers generates."""
        options = {"max_new_tokens": 12, "do_sample": False, **options}
        return self.plain.generate(**batch, pad_token_id=0, **options)


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(write_vision_model(tmp_path_factory.mktemp(request.param), request.param))


def split(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return ids, mask and further inputs of a batch."""
    others = {n: v for n, v in batch.items() if n not in ("input_ids", "attention_mask")}
    return batch["input_ids"], batch["attention_mask"], others


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "prompts",
    [
        [(0, "What is this?")],
        [("Compare ", 0, " with ", 1, " and ", 2)],
        [(0, "a"), ("no image",), (1, 2, "two of them")],
    ],
    ids=["one", "three", "batch"],
)
def test_tokens_are_those_of_transformers(
    opened: Opened, prompts: list[tuple[Any, ...]], num_beams: int
) -> None:
    batch = opened.batch(*prompts)
    wanted = opened.generate(batch, num_beams=num_beams)
    ids, mask, inputs = split(batch)
    options = {"max_new_tokens": 12, "num_beams": num_beams, "eos_token_id": (), "pad_token_id": 0}
    ours = generate(opened.ours, ids, mask, inputs=inputs, **options)
    assert torch.equal(ours, wanted)
    if num_beams == 1:
        other = {n: v.flip(-1) if n == "pixel_values" else v for n, v in inputs.items()}
        assert not torch.equal(generate(opened.ours, ids, mask, inputs=other, **options), ours)


def test_sampled_tokens_follow_the_scores_of_transformers(opened: Opened) -> None:
    """With top-k of 1 sampling is greedy; a penalty changes scores as in transformers."""
    batch = opened.batch((1, "Write"))
    ids, mask, inputs = split(batch)
    same = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.7, "max_new_tokens": 9}
    wanted = opened.generate(batch, **same)
    ours = generate(
        opened.ours, ids, mask, inputs=inputs, eos_token_id=(), num_return_sequences=2, **same
    )
    assert torch.equal(ours, wanted.repeat_interleave(2, 0))


def test_chat_prompts_have_the_ids_of_transformers(opened: Opened) -> None:
    """Template, image tokens and inputs equal those of the processor's chat template."""
    content = [{"type": "image", "image": IMAGES[0]}, {"type": "text", "text": "Hi there"}]
    plain = opened.processor._processor
    source = find_template(opened.directory)
    wanted = plain.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=source,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    encoded = opened.processor.encode(opened.text(0, "Hi there"), IMAGES[:1])
    assert encoded.ids == wanted["input_ids"][0].tolist()
    for name, value in encoded.inputs.items():
        assert torch.equal(value, wanted[name]), name


def test_requests_with_images_do_not_change_texts_beside(opened: Opened) -> None:
    """The engine interleaves requests; each has the tokens that it has alone."""
    prompts = [(0, "What?"), ("Only a text, of several words",), (1, 2, "Which?")]
    requests, wanted = [], []
    options = GenerationConfig(max_new_tokens=10, eos_token_id=())
    for parts in prompts:
        batch = opened.batch(parts)
        ids, _, inputs = split(batch)
        wanted.append(opened.generate(batch, max_new_tokens=10)[0, ids.shape[1] :].tolist())
        requests.append(Request(ids[0].tolist(), options, inputs=inputs))
    with Engine(opened.ours, tokenizer=opened.tokenizer) as engine:
        for order in ((0, 1, 2), (2, 1, 0, 1)):
            handles = [engine.submit(requests[number]) for number in order]
            for number, handle in zip(order, handles, strict=True):
                (answer,) = handle.wait(60)
                assert list(answer.ids) == wanted[number], number
                assert answer.cached_tokens == 0


def test_a_row_can_choose_its_adapter(opened: Opened) -> None:
    ids, mask, inputs = split(opened.batch((0, "a"), (0, "a")))
    tuned = AutoModel.from_pretrained(opened.directory).eval()
    targets = [n for n, _ in tuned.named_modules() if n.endswith("layers.1.self_attn.q_proj")]
    targets = [name for name in targets if "vision" not in name]
    lora = Lora(tuned, targets=targets, rank=2)
    for part in lora.parameters():
        torch.nn.init.normal_(part, 0, 0.5, generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "eos_token_id": ()}
    base, adapted = generate(
        tuned, ids, mask, inputs=inputs, adapter_names=[None, lora.name], **options
    )
    alone = generate(opened.ours, ids, mask, inputs=inputs, **options)
    assert torch.equal(base, alone[0])
    assert not torch.equal(adapted, base)
    if opened.ours.config.head == "image_text_to_text":  # no adapters on Gemma 3's vision tower
        names = [n for n, _ in tuned.named_modules() if n.endswith(("qkv", "k_proj"))]
        other = Lora(tuned, targets=[n for n in names if "vis" in n], rank=2, name="tower")
        with pytest.raises(ConfigError, match="cannot use different adapters in one batch"):
            generate(tuned, ids, mask, inputs=inputs, adapter_names=[None, lora.name], **options)
        other.remove()
    lora.merge()
    assert torch.equal(generate(tuned, ids, mask, inputs=inputs, **options)[1], adapted)


@pytest.mark.long
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_tokens_of_further_architectures(kind: str, tmp_path: Path) -> None:
    config, plain_processor, mark = build_vision_model(kind)
    save_random(config, tmp_path)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    plain.generation_config.eos_token_id = None
    ours, processor = AutoModel.from_pretrained(tmp_path).eval(), Processor(plain_processor)
    texts, images = [f"{mark} what", f"{mark} and {mark}"], [IMAGES[:1], IMAGES[:2]]
    rows = 1 if kind == "paligemma" else 2  # its processor writes the image tokens itself
    for count in range(1, rows + 1):
        batch = processor.encode_batch(texts[:count], images[:count])
        ids, mask, inputs = split(batch)
        for num_beams in (1, 3):
            wanted = plain.generate(
                **batch, max_new_tokens=9, do_sample=False, num_beams=num_beams, pad_token_id=0
            )
            options = {"max_new_tokens": 9, "num_beams": num_beams, "pad_token_id": 0}
            mine = generate(ours, ids, mask, inputs=inputs, eos_token_id=(), **options)
            assert torch.equal(mine, wanted), (count, num_beams)


def test_processors_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The error names the package that is missing, or the file that is wrong."""
    assert find_processor(tmp_path) is None
    folder = write_vision_model(tmp_path / "model", "qwen2_5_vl")
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    if not transformers.utils.is_torchvision_available():
        file.write_text(json.dumps({**settings, "processor_class": "MiniCPMV4_6Processor"}))
        with pytest.raises(ConfigError, match="MiniCPMV4_6Processor needs the package torchvision"):
            find_processor(folder)
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot load the processor"):
        find_processor(folder)


def test_inputs_that_a_model_cannot_use_are_refused() -> None:
    model = Llama.from_config(LlamaConfig(vocab_size=40, hidden_size=16, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="supports only tokens as inputs"):
        generate(model, torch.tensor([[1, 2]]), inputs={"pixel_values": torch.zeros(1, 3, 4, 4)})


def png(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 999)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*pair) for pair in ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    )


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    for width, height in ((4097, 4096), (30_000, 30_000), (2**31 - 1, 2**31 - 1)):
        with pytest.raises(DataError, match="pixels"):
            read_data_uri(uri(png(width, height)), "the image", 1 << 24)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("https://example.org/a.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("data:text/plain;base64,AAAA", "needed: data:image/png"),
        ("data:image/png;base64,?", "not valid base64"),
        ("data:image/png,AAAA", "needed: data:image/png"),
        ("data:image/png;base64,AAAA", "cannot be read as an image"),
        (uri(png(40, 40)), "cannot be read as an image"),
        (uri(b"%PDF-1.4"), "cannot be read as an image"),
    ],
)
def test_data_uris_that_are_refused(name: str, problem: str) -> None:
    with pytest.raises(BmforgeError, match=problem):
        read_data_uri(name, "the image")


def test_images_are_turned_upright() -> None:
    image = make_image(6, 4, 5)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    read = np.asarray(read_image(file.getvalue(), "the image"))
    assert np.array_equal(read, np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"),
        ("PNG", "1"), ("PNG", "I;16"), ("WEBP", "RGBA"), ("GIF", "P"),
    ],
)  # fmt: skip
def test_color_modes_are_those_of_transformers(form: str, mode: str, tmp_path: Path) -> None:
    """Pixels of every mode and rotation equal those of transformers' `load_image`."""
    image = make_image(31, 17, 6)
    image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(np.asarray(image.convert("L"))))
    for rotation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = rotation
        file = tmp_path / f"{rotation}.img"
        more = {"transparency": 3} if mode == "P" else {}
        image.save(file, form, **({} if form == "GIF" else {"exif": exif}), **more)
        wanted = transformers.image_utils.load_image(str(file))
        read = read_image(file.read_bytes(), "the image")
        assert np.array_equal(np.asarray(read), np.asarray(wanted)), rotation


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM"])
def test_formats(form: str) -> None:
    file = io.BytesIO()
    IMAGES[2].save(file, form)
    assert read_image(file.getvalue(), "the image").size == (28, 28)
