"""The engine: the bits of the plain model under any budget, and what it says when asked wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import BmforgeError, CheckpointError, ConfigError, ShapeError
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.models import T5, AutoModel, Llama, LlamaConfig, Mixtral, MixtralConfig, T5Config

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 256}
SMALL = EngineConfig(max_tokens=24, max_rows=4)
IDS = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(0))


def make(kind: str) -> Any:
    if kind == "t5":
        return T5.from_config(T5Config(**SIZES, num_heads=4, num_layers=4), seed=1)
    if kind == "mixtral":
        config = MixtralConfig(
            **SIZES, num_heads=4, num_layers=3, num_kv_heads=2, num_experts=4, experts_per_token=2
        )
        return Mixtral.from_config(config, seed=1)
    return Llama.from_config(
        LlamaConfig(**SIZES, num_heads=4, num_layers=6, max_seq_len=64), seed=1
    )


@pytest.fixture(params=["llama", "t5", "mixtral"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = make(request.param).eval()
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Any, Path]:
    model = make("llama").eval()
    model.save_pretrained(tmp_path)
    return model, tmp_path


def smallest(source: Any, **options: Any) -> int:
    """The least budget, as the engine says it."""
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        Engine(source, device_budget_bytes=1, **options)
    text = str(caught.value)
    return int(text.split("too small: ")[1].split()[0])


def budgets(source: Any, model: Any) -> list[int]:
    """From the smallest on up to one with which everything stays."""
    least = smallest(source, config=SMALL)
    whole = sum(t.numel() * t.element_size() for t in model.parameters())
    return [least, least + whole // 4, least + whole // 2, least + whole]


def test_any_budget_has_the_bits(saved: tuple[Any, Path]) -> None:
    """Opened from a directory: as many blocks stay as fit, and all say what the model says."""
    model, directory = saved
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": ()}
    want = generate(model, IDS, **options)
    beams = generate(model, IDS, num_beams=2, **options)
    counts = []
    for budget in budgets(directory, model):
        with Engine(directory, device_budget_bytes=budget, config=SMALL) as engine:
            assert engine.plan.used_bytes <= budget
            assert torch.equal(engine.generate(IDS, **options), want)
            assert torch.equal(generate(engine.model, IDS, num_beams=2, **options), beams)
            counts.append(len(engine.plan.resident))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(engine.plan.resident)
    assert engine.plan.moved_bytes == 0


def test_packed_first(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """A directory and a module give what a directory packed before gives; nothing is left."""
    model, directory = saved
    spill = tmp_path / "spill"
    spill.mkdir()
    config = EngineConfig(max_tokens=SMALL.max_tokens, spill_directory=spill)
    least = smallest(directory, config=config, quantize="int4")
    assert least < smallest(directory, config=config)
    assert not list(spill.iterdir())
    ids = torch.arange(10)[None]
    want = generate(AutoModel.from_pretrained(directory, quantize="int4"), ids, max_new_tokens=5)
    for source in (directory, model):
        with Engine(source, device_budget_bytes=least, quantize="int4", config=config) as engine:
            assert engine.plan.on_disk
            assert torch.equal(engine.generate(ids, max_new_tokens=5), want)
        assert not list(spill.iterdir())


def test_a_module_in_memory(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """It stays the same object; what does not fit is read from a file without a name."""
    model, _ = saved
    want = generate(model, IDS, max_new_tokens=6)
    budget = budgets(model, model)[1]
    folder = tmp_path / "spill"
    folder.mkdir()
    config = EngineConfig(max_tokens=24, max_rows=4, spill_directory=folder)
    with Engine(model, device_budget_bytes=budget, config=config) as engine:
        assert engine.model is model
        assert engine.plan.on_disk
        assert torch.equal(engine.generate(IDS, max_new_tokens=6), want)
        assert not list(folder.iterdir())


def test_the_decoder_leaves_last(tmp_path: Path) -> None:
    model = make("t5")
    model.save_pretrained(tmp_path)
    for budget in budgets(tmp_path, model):
        with Engine(tmp_path, device_budget_bytes=budget, config=SMALL) as engine:
            stay = [name.partition(".")[0] for name in engine.plan.resident]
            if "encoder" in stay and engine.plan.moved_bytes:
                room = budget - engine.plan.used_bytes
                assert stay.count("decoder") == 4 or room < engine.plan.slots_bytes // 2


def test_nothing_is_read_before_the_budget_is_known(
    llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = llama
    from bmforge.models.formats.safe_file import SafeFile

    def fill(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafeFile, "fill", fill)
    smallest(directory, config=SMALL)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device_budget_bytes": -5}, "device_budget_bytes=-5 must be above 0"),
        ({"device_budget_bytes": 1 << 60}, "more than the machine's memory"),
        ({"host_budget_bytes": 1 << 30}, "no effect on a CPU"),
        ({"config": EngineConfig(max_tokens=65)}, "max_tokens=65 is more than"),
        ({"device_budget_bytes": 1 << 20}, "is the smallest that works"),
    ],
)
def test_budgets_that_cannot_be(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    from bmforge.models import GPT2, GPT2Config

    config = GPT2Config(vocab_size=96, hidden_size=32, num_layers=2, num_heads=2, max_seq_len=64)
    GPT2.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=match):
        Engine(tmp_path, **options)


def test_configs_that_cannot_be() -> None:
    for wrong in ({"max_rows": 0}, {"max_tokens": 1}):
        with pytest.raises(ConfigError, match="is out of range"):
            EngineConfig(**wrong)


def open_llama(directory: Path, **options: Any) -> Engine:
    budget = smallest(directory, config=SMALL) + 100_000
    return Engine(directory, device_budget_bytes=budget, config=SMALL, **options)


def test_prompts_that_cannot_be(llama: tuple[Any, Path]) -> None:
    """Empty, outside of the vocabulary, more or longer than planned for."""
    with open_llama(llama[1]) as engine:
        wrong: list[tuple[torch.Tensor, type[BmforgeError], str]] = [
            (IDS[:, :0], ShapeError, "at least one token"),
            (IDS + 300, ShapeError, "vocab_size=300"),
            (IDS.repeat(3, 1), ConfigError, "max_rows=4"),
            (IDS.repeat(1, 3), ConfigError, "max_tokens=24"),
        ]
        for ids, kind, match in wrong:
            with pytest.raises(kind, match=match):
                engine.generate(ids, max_new_tokens=4)
        with pytest.raises(ConfigError, match="at least one prompt"):
            engine.generate([])
        with pytest.raises(ConfigError, match="unknown option of generate: 'tokens'"):
            engine.generate(IDS, tokens=4)
        assert engine.generate(IDS, max_new_tokens=4).shape == (2, 13)  # it still runs


def test_closed_and_busy(llama: tuple[Any, Path]) -> None:
    engine = open_llama(llama[1], tokenizer=_Numbers(300))
    pieces = engine.stream("1 2 3", max_new_tokens=5)
    next(pieces)
    with pytest.raises(ConfigError, match="one direct call at a time"):
        engine.generate(IDS)
    pieces.close()
    engine.generate(IDS, max_new_tokens=2)
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.generate(IDS)


class _Numbers:
    """A tokenizer of numbers with spaces between them."""

    eos_id = bos_id = pad_id = unk_id = mask_id = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    encode_prompt = encode
    prompt_prefix = ()

    def decode_written(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def role_id(self, role: str) -> None:
        return None


def test_texts(llama: tuple[Any, Path]) -> None:
    """A text, texts and a stream write what ids do."""
    model, directory = llama
    want = generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=5)[0].tolist()
    text = " ".join(map(str, want))
    with open_llama(directory, tokenizer=_Numbers(300)) as engine:
        assert engine.generate("1 2 3", max_new_tokens=5) == text
        assert engine.generate(["1 2 3"] * 2, max_new_tokens=5) == [text] * 2
        streamed = list(engine.stream("1 2 3", max_new_tokens=5))
        assert len(streamed) == 5
        assert "".join(streamed) == text.removeprefix("1 2 3")
        for empty in ("", " "):
            with pytest.raises(ConfigError, match="empty"):
                engine.generate(empty)
        with pytest.raises(ConfigError, match="empty"):
            next(engine.stream(""))


def test_a_tokenizer_of_another_model(llama: tuple[Any, Path]) -> None:
    with (
        open_llama(llama[1], tokenizer=_Numbers(301)) as engine,
        pytest.raises(ConfigError, match="301 tokens, but the model has vocab_size=300"),
    ):
        engine.generate("1 2")
    with (
        Engine(make("llama"), config=SMALL) as engine,
        pytest.raises(ConfigError, match="needs a tokenizer"),
    ):
        engine.generate("1 2")


def test_a_directory_that_vanishes(llama: tuple[Any, Path]) -> None:
    """Said where the next block is needed; once it is back, the engine goes on."""
    model, directory = llama
    path = directory / "model.safetensors"
    budget = smallest(directory, config=SMALL)
    with Engine(directory, device_budget_bytes=budget, config=SMALL) as engine:
        path.rename(path.with_suffix(".away"))
        with pytest.raises(CheckpointError, match="was removed after"):
            engine.generate(IDS, max_new_tokens=2)
        path.with_suffix(".away").rename(path)
        want = generate(model, IDS, max_new_tokens=4)
        assert torch.equal(engine.generate(IDS, max_new_tokens=4), want)
        content = bytearray(path.read_bytes())
        content[-5000] ^= 1
        path.write_bytes(bytes(content))
        with pytest.raises(CheckpointError, match=r"was changed while|bytes early"):
            engine.generate(IDS, max_new_tokens=2)


def test_gradients_when_they_are_asked_for(llama: tuple[Any, Path]) -> None:
    """To inputs, norms and biases, with the bits of the model whose blocks all stay."""
    model, directory = llama
    found = []
    with open_llama(directory) as engine:
        assert engine.plan.moved_bytes
        for one in (model.requires_grad_(False), engine.model):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name.endswith("norm.weight"))
            optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
            x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
            for _ in range(3):  # what is trained stays where it is
                optimizer.zero_grad()
                loss = one(inputs_embeds=x).logits.square().mean()
                loss.backward()
                optimizer.step()
            grads = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
            found.append({"loss": loss.detach(), "x": x.grad, **grads})
    assert len(found[0]) == 2 + 13
    from bmforge.testing import assert_equal_trees

    assert_equal_trees(found[1], found[0])


def test_the_plan_is_drawn(llama: tuple[Any, Path]) -> None:
    with open_llama(llama[1]) as engine:
        text = str(engine.plan)
        for name, _ in engine.plan.parts():
            assert name in text
        assert f"{len(engine.plan.resident)} of 6 blocks stay" in text
        assert "\u2588" in text  # a bar


def test_models_that_it_does_not_take(llama: tuple[Any, Path]) -> None:
    model, directory = llama
    with (
        open_llama(directory) as engine,
        pytest.raises(ConfigError, match="already parallelized or streamed"),
    ):
        Engine(engine.model)
    with pytest.raises(ConfigError, match="on the meta device"):
        Engine(Llama.from_config(model.config, device="meta"))
    with pytest.raises(ConfigError, match="head can be set only if the engine loads the model"):
        Engine(model, head="none")
    with (
        Engine(directory, head="none", config=SMALL) as engine,
        pytest.raises(ConfigError, match="needs a model that generates"),
    ):
        engine.generate(IDS)
