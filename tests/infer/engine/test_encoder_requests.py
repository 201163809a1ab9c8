"""Embeddings and documents of many callers: each has what it has alone, and ends when it must."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from test_requests import PROMPTS, greedy, make, opened

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import Engine, EngineConfig, Request
from bmforge.models import (
    Bert,
    BertConfig,
    Longformer,
    LongformerConfig,
    Roberta,
    RobertaConfig,
    ViT,
    ViTConfig,
)
from bmforge.models.pack import quantize_

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "head": "none",
}  # fmt: skip
ENCODERS = ["bert", "roberta", "longformer", "vit"]


def encoder(kind: str, **more: Any) -> Any:
    if kind == "vit":
        return ViT.from_config(ViTConfig(**SIZES, image_size=16, patch_size=4), seed=1).eval()
    family, config = {
        "bert": (Bert, BertConfig),
        "roberta": (Roberta, RobertaConfig),
        "longformer": (Longformer, LongformerConfig),
    }[kind]
    if kind == "longformer":
        more |= {"windows": (8,)}
    sizes = {**SIZES, "vocab_size": 97, "max_seq_len": 128, **more}
    return family.from_config(config(**sizes), seed=1).eval()


def rows_of(kind: str) -> list[Any]:
    """What several callers ask, one each; some are as long as others."""
    if kind == "vit":
        return list(torch.randn(4, 1, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    return [[one] for one in (*PROMPTS[1:5], [5, *PROMPTS[1][1:]], PROMPTS[3][::-1])]


class Held:
    """Keeps an engine's thread, so that what is asked meanwhile comes together."""

    def __init__(self, engine: Engine) -> None:
        self._goes_on, begun = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            self._goes_on.wait(60)

        self._thread = threading.Thread(target=engine.call, args=(hold,))
        self._thread.start()
        assert begun.wait(60)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()
        self._thread.join()


def count_passes(model: Any) -> list[int]:
    """The rows of every pass from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(next(iter((*args, *kwargs.values()))))),
        with_kwargs=True,
    )
    return seen


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_same_bits_beside_others(kind: str, scheme: str | None) -> None:
    model = encoder(kind)
    if scheme is not None:
        quantize_(model, scheme)
    with Engine(model) as engine:
        alone = [engine.embed(torch.as_tensor(row)) for row in rows_of(kind)]
        with Held(engine):
            together = [engine.submit_embed(row) for row in rows_of(kind)]
        found = [future.result(60) for future in together]
    assert all(torch.equal(*pair) for pair in zip(alone, found, strict=True))


def test_rows_of_several_callers_share_passes_where_weights_come_from_disk(tmp_path: Path) -> None:
    encoder("bert", num_layers=6).save_pretrained(tmp_path)
    config = EngineConfig(max_tokens=128, max_rows=3)
    with pytest.raises(ConfigError, match="too small") as caught:
        Engine(tmp_path, device_budget_bytes=1, config=config, head="none")
    least = int(str(caught.value).split("too small: ")[1].split()[0])
    with Engine(tmp_path, device_budget_bytes=least, config=config, head="none") as engine:
        assert engine.plan.on_disk
        rows = [[[n, *PROMPTS[1]]] for n in range(7)] + [[PROMPTS[2]]]
        alone = [engine.embed(torch.tensor(row)) for row in rows]
        seen = count_passes(engine.model)
        with Held(engine):
            together = [engine.submit_embed(row) for row in rows]
        found = [future.result(60) for future in together]
    assert seen == [3, 3, 1, 1]
    torch.testing.assert_close(torch.cat(found), torch.cat(alone))


def test_one_caller_with_rows_of_any_length() -> None:
    with Engine(encoder("bert")) as engine:
        found = engine.submit_embed(PROMPTS, pooling="first", normalize=False).result(60)
        want = [engine.embed(torch.tensor([p]), pooling="first", normalize=False) for p in PROMPTS]
    assert torch.equal(found, torch.cat(want))


def test_texts_of_one_request_share_passes() -> None:
    """Texts of equal length share passes up to a number of tokens; other callers' do not."""
    model = encoder("bert")
    texts = [[number, *row] for row in ([3, 5], [7] * 39) for number in range(40)]
    with Engine(model) as engine:
        alone = torch.cat([engine.embed(torch.tensor([text])) for text in texts])
        seen = count_passes(model)
        with Held(engine):
            ours = engine.submit_embed(texts)
            other = engine.submit_embed([texts[0]])
        torch.testing.assert_close(ours.result(60), alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(other.result(60), alone[:1])
    assert seen == [16, 16, 8, *[3] * 13, 1, 1]


def test_the_queue_of_many_texts_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time per text is the same with 100 and with 1,600 texts."""
    from bmforge.infer.engine import encodings

    states = torch.zeros(64, 2, 4)
    monkeypatch.setattr(encodings, "read_states", lambda _, rows: states[: len(rows["input_ids"])])

    def seconds(count: int) -> float:
        queue = encodings.Encodings(model, 1, 2)
        rows = [{"input_ids": torch.zeros(1, 1 + n % 50, dtype=torch.long)} for n in range(count)]
        request = encodings.Encoding(rows)
        queue.add(request)
        begin = time.thread_time()
        while queue:
            queue.step()
        spent = time.thread_time() - begin
        assert request.future.result(0).shape == (count, 4)
        return spent

    model = encoder("bert")
    assert seconds(1600) / 1600 < 4 * seconds(100) / 100


def test_what_is_written_goes_on_beside_it() -> None:
    """A pass of an embedding takes a step, not all of them."""
    with opened(make("llama")) as engine:
        with Held(engine):
            rows = engine.submit_embed([PROMPTS[5]] * 160)
            handle = engine.submit(Request(PROMPTS[1], greedy()))
        order: list[str] = []
        handle.watch(lambda: order.append("written") if handle.done else None)
        rows.add_done_callback(lambda _: order.append("embedded"))
        rows.result(60)
        handle.wait(60)
    assert order[0] == "written"
    assert order[-1] == "embedded"


def test_deadlines_and_callers_that_go() -> None:
    model = encoder("bert")
    with Engine(model) as engine:
        seen = count_passes(model)
        with Held(engine):
            late = engine.submit_embed([PROMPTS[1]] * 50, deadline_s=1e-6)
            gone = engine.submit_embed([PROMPTS[1]] * 50)
            assert gone.cancel()
        with pytest.raises(TimeoutError, match="deadline_s"):
            late.result(60)
        with pytest.raises(CancelledError):
            gone.result(60)
        engine.submit_embed([PROMPTS[1]]).result(60)
        assert len(seen) == 1
        assert engine.requests_status().waiting == 0


def test_a_row_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from bmforge.infer.engine import encodings

    real = encodings.read_states

    def read(model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        if bool((rows["input_ids"] == 13).any()):
            raise RuntimeError("of this row")
        return real(model, rows)

    monkeypatch.setattr(encodings, "read_states", read)
    monkeypatch.setattr(encodings, "can_batch_sequences", lambda _: True)
    with Engine(encoder("bert")) as engine:
        with Held(engine):
            good, bad = engine.submit_embed([[1, 2, 3]]), engine.submit_embed([[1, 13, 3]])
        assert good.result(60).shape == (1, 32)
        with pytest.raises(RuntimeError, match="of this row"):
            bad.result(60)


@pytest.mark.parametrize(
    ("inputs", "error", "problem"),
    [
        ([], ConfigError, "at least one"),
        ([[]], ConfigError, "an empty string"),
        ([[1, 97]], ShapeError, "vocab_size=97"),
        ([[-1]], ShapeError, "vocab_size=97"),
        ([[1] * 129], ConfigError, "allowed: 1 to 128"),
    ],
)
def test_what_cannot_be_read(inputs: Any, error: type[Exception], problem: str) -> None:
    with Engine(encoder("bert")) as engine, pytest.raises(error, match=problem):
        engine.submit_embed(inputs)


def test_a_closed_engine_lets_nobody_wait() -> None:
    engine = Engine(encoder("bert"))
    with Held(engine):
        waiting = engine.submit_embed([PROMPTS[1]] * 50)
        threading.Thread(target=engine.close).start()
        while not (engine._requests is not None and engine._requests._is_closed):
            pass
    with pytest.raises(Exception, match="closed"):
        waiting.result(60)
    with pytest.raises(ConfigError, match="closed"):
        engine.submit_embed([PROMPTS[1]])
