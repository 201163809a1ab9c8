"""Deltas that requests choose by the name of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tiny_chat_model import write_model

from bmforge.cli.open_model import delta_names, find_names, put_named_deltas_
from bmforge.cli.serve import _open_engine
from bmforge.cli.serve_options import ServeCommand
from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request
from bmforge.models import AutoModel
from bmforge.recipes.adapter_dirs import find_source
from bmforge.serve.app import create_app
from bmforge.settings import MemoryOptions
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.delta import Adapter, Lora, use_deltas

SAID: list[Any] = [{"role": "user", "content": "天气"}]


@pytest.fixture(scope="module")
def given(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `--adapter` is told."""
    folder = tmp_path_factory.mktemp("deltas")
    for number, kind in enumerate((Lora, Adapter)):
        model = AutoModel.from_pretrained(model_directory)
        delta = kind(model)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for tensor in delta.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.5)
        delta.save(folder / kind.__name__)
    return [f"ann={folder / 'Lora'}", f"bob v1.2={folder / 'Adapter'}"]


def test_the_model_of_a_request_chooses(
    start: Any, model_directory: Path, given: list[str]
) -> None:
    model: Any = AutoModel.from_pretrained(model_directory)
    names = find_names(given)
    put_named_deltas_(model, names)
    inner, tokenizer = delta_names(names), AutoTokenizer.from_pretrained(model_directory)
    config = EngineConfig(max_tokens=256)
    asked = ["tiny", *names]
    said, shown, embedded = {}, {}, {}
    with (
        Engine(model.eval(), tokenizer=tokenizer, config=config) as engine,
        start(other=engine, place=model_directory, deltas=inner, name="tiny") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        assert [one.id for one in client.models.list().data] == asked
        for name in asked:
            options: dict[str, Any] = {"model": name, "max_tokens": 8, "temperature": 0}
            chat = client.chat.completions.create(messages=SAID, **options)
            assert chat.model == name
            shown[name] = chat.choices[0].message.content
            events = list(client.completions.create(prompt="天", stream=True, **options))
            assert {event.model for event in events} == {name}
            said[name] = "".join(e.choices[0].text for e in events if e.choices)
            found = client.embeddings.create(model=name, input="天气")
            embedded[name] = torch.tensor(found.data[0].embedding)
        with pytest.raises(openai.NotFoundError, match=r"unknown model 'cat' \(available: 'tiny'"):
            client.chat.completions.create(model="cat", messages=SAID)
        assert len(set(said.values())) == len(set(shown.values())) == 3
        for name in asked:
            use_deltas(model, [inner[name]] if name in inner else ())
            (want,) = engine.call(lambda: engine.embed("天气"))
            assert torch.equal(embedded[name], want)
            options = {"model": "tiny", "max_tokens": 8, "temperature": 0}
            alone = client.completions.create(prompt="天", **options)
            assert alone.choices[0].text == said[name]


@pytest.fixture
def deep(tmp_path: Path) -> tuple[Path, Path]:
    """A model of six blocks, and a Lora of it."""
    place = write_model(tmp_path / "deep", num_layers=6)
    lora = Lora(AutoModel.from_pretrained(place), ["attn.q", "mlp.down"], rank=2)
    for _, _, part in lora.held:
        torch.nn.init.normal_(part.up, std=0.5, generator=torch.Generator().manual_seed(1))
    lora.save(tmp_path / "lora")
    return place, tmp_path / "lora"


@pytest.mark.parametrize("form", ["ann={}", "{}=0.5"])
def test_what_is_served_in_a_budget(deep: tuple[Path, Path], form: str) -> None:
    """Blocks come and go beside the delta, and what is written is written without a budget too."""
    place, lora = deep
    options = GenerationConfig(max_new_tokens=6, eos_token_id=())
    choices = [None, "delta0", ()] if form.startswith("ann") else [None, ()]

    def answer(budget: int | None) -> list[Any]:
        told = {"adapter": (form.format(lora),), "context": 64, "max_num_seqs": 2}
        command = ServeCommand(model=str(place), **told)
        with _open_engine(command, find_source(place), budget) as engine:
            assert bool(engine.plan.on_disk) == (budget is not None)
            asked = [engine.submit(Request("ab", options, delta=one)) for one in choices]
            return [handle.wait(60)[0].ids for handle in asked]

    want = answer(None)
    assert len(set(want)) == 2
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        answer(1)
    least = int(str(caught.value).split("too small: ")[1].split()[0])
    assert answer(least) == want
    with pytest.raises(ConfigError, match=f"too small: {least} "):
        answer(least - 1)


def test_devices_are_planned_for_all_who_ask(deep: tuple[Path, Path]) -> None:
    """Free memory that is divided has room for everyone's keys and values."""
    options = {"context": 64, "max_num_seqs": 3, "memory": MemoryOptions(devices="cpu,cpu")}
    with _open_engine(
        ServeCommand(model=str(deep[0]), **options), find_source(deep[0]), None
    ) as engine:
        plan = engine.plan.cache_bytes
    options |= {"max_num_seqs": 1}
    with _open_engine(
        ServeCommand(model=str(deep[0]), **options), find_source(deep[0]), None
    ) as engine:
        assert plan == 3 * engine.plan.cache_bytes


def test_names_are_each_ones_own(model_directory: Path, given: list[str], tmp_path: Path) -> None:
    assert list(find_names(given)) == ["ann", "bob v1.2"]
    where = given[0].partition("=")[2]
    assert find_names([where, f"{where}=0.5"]) == {}
    for wrong in ([*given, where], [given[0], given[0]]):
        with pytest.raises(ConfigError, match="Name each of them differently"):
            find_names(wrong)
    with pytest.raises(ConfigError, match="'nowhere' is neither a weight nor an adapter directory"):
        find_names(["ann=nowhere"])
    place = write_model(tmp_path / "ann", num_layers=1)
    with Engine(place, config=EngineConfig(max_tokens=64)) as engine:  # noqa: SIM117
        with pytest.raises(ConfigError, match="'ann' is the name of more than one model"):
            create_app(engine, directory=place, deltas={"ann": "delta0"})
