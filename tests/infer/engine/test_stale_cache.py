"""A model that changes between two requests: cached keys and values are dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_requests import ALL, PROMPTS, greedy, make, opened, say

from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request
from bmforge.infer.engine.changes import Changes
from bmforge.models import load_weights_
from bmforge.models.pack import quantize_
from bmforge.nn.norm import RMSNorm
from bmforge.train.optim.adam_kernel import load_adam_kernel
from bmforge.tune.delta import Lora, use_deltas

PROMPT = [*PROMPTS[5], *PROMPTS[4]]
CACHED = (len(PROMPT) - 1) // 16 * 16


def ask(engine: Engine) -> Any:
    return engine.submit(Request(PROMPT, greedy())).wait(60)


def put_lora(model: Any) -> Any:
    lora = Lora(model, rank=2, targets=["attn.q", "mlp.down"], name="one")
    for parameter in lora.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return lora


def step(model: Any, _: Path) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True).grad = torch.full_like(parameter, 0.1)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def step_natively(model: Any, _: Path) -> None:
    """As optimizers do whose state is away: the kernel writes into the weights' memory."""
    kernel = load_adam_kernel()
    if kernel is None:
        pytest.skip("no compiler here")
    numbers = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for parameter in model.parameters():
        weights = parameter.detach().view(-1)[: parameter.numel() // 16 * 16]
        ones = torch.ones_like(weights)
        kernel.step(weights, ones, torch.zeros_like(ones), torch.zeros_like(ones), numbers, 1.0)


def load(model: Any, place: Path) -> None:
    other = make("llama")
    step(other, place)
    other.save_pretrained(place)
    load_weights_(model, place)


def move(model: Any, _: Path) -> None:
    weight = model.layers["0"].attn.k_proj.weight
    weight.data = weight.data * 2


def replace(model: Any, _: Path) -> None:
    proj = model.layers["0"].attn.k_proj
    proj.weight = torch.nn.Parameter(proj.weight.detach() * 2)


def hook(model: Any, _: Path) -> None:
    model.layers["0"].register_forward_hook(lambda *args: args[2] * 2)


def scale(model: Any, _: Path) -> None:
    model.layers["0"].mlp_residual.out_scale = 0.5


def add_part(model: Any, _: Path) -> None:
    put_lora(model)


def pack(model: Any, _: Path) -> None:
    quantize_(model, "int8")


CHANGES: list[Callable[[Any, Path], None]] = [
    step, step_natively, load, move, replace, hook, scale, add_part, pack,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_answers_as_a_new_engine(
    change: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model = make("llama")
    with opened(model) as engine:
        before = ask(engine)
        assert ask(engine)[0].cached_tokens == CACHED
        change(model, tmp_path)
        after, again = ask(engine), ask(engine)
    assert after[0].cached_tokens == 0
    assert again[0].cached_tokens > 0
    assert say(after) != say(before)
    with opened(model) as engine:
        assert say(after) == say(again) == say(ask(engine))


@pytest.mark.parametrize(
    "change",
    [
        lambda lora: lora.weigh_(0.5),
        lambda lora: use_deltas(lora.model, ()),
        lambda lora: use_deltas(lora.model, "one", [2.0]),
        lambda lora: lora.merge(),
        lambda lora: lora.detach(),
    ],
    ids=["weigh_", "off", "on", "merge", "detach"],
)
def test_a_delta_that_is_weighed(change: Callable[[Any], Any]) -> None:
    model = make("llama")
    lora = put_lora(model)
    with opened(model) as engine:
        ask(engine)
        assert ask(engine)[0].cached_tokens > 0
        change(lora)
        after = ask(engine)
    assert after[0].cached_tokens == 0
    with opened(model) as engine:
        assert say(after) == say(ask(engine))


def test_a_change_between_two_steps() -> None:
    """By `call`: who runs goes on as the new model would, and leaves nothing of the old one."""
    model = make("llama")
    begun = threading.Event()
    with opened(model) as engine:
        running = engine.submit(Request(PROMPT, greedy(max_new_tokens=40)))
        running.watch(begun.set)
        assert begun.wait(60)
        engine.call(lambda: replace(model, Path()))
        (whole,) = running.wait(60)
        after = ask(engine)
        longer = [*PROMPT, *whole.ids[:20]]
        behind = engine.submit(Request(longer, greedy())).wait(60)
    with opened(model, enable_prefix_caching=False) as engine:
        assert say(after) == say(ask(engine))
        assert say(behind) == say(engine.submit(Request(longer, greedy())).wait(60))


@pytest.mark.parametrize("kind", ALL)
def test_a_model_that_answers_is_no_other_one(kind: str, tmp_path: Path) -> None:
    """Nor one whose blocks come from disk."""
    model = make(kind)
    changes = Changes(model)
    with opened(model) as engine:
        ask(engine)
        assert not changes.since_last()
        engine.generate(torch.tensor([PROMPT]), max_new_tokens=2)
        engine.embed(torch.tensor([PROMPT]))
        assert not changes.since_last()
    model.save_pretrained(tmp_path)
    config = EngineConfig(max_tokens=128, stream_experts=kind == "mixtral")
    with pytest.raises(Exception, match="too small") as caught:
        Engine(tmp_path, device_budget_bytes=1, config=config)
    least = int(str(caught.value).split("too small: ")[1].split()[0])
    with Engine(tmp_path, device_budget_bytes=least, config=config) as engine:
        changes = Changes(engine.model)
        ask(engine)
        assert not changes.since_last()


def test_beams_beside_leave_prefixes() -> None:
    """Rows of their own watch the model's calls by a hook, which changes nothing of its answers."""
    with opened(make("llama")) as engine:
        ask(engine)
        beams = Request(PROMPTS[4], GenerationConfig(max_new_tokens=20, num_beams=2))
        running = engine.submit(beams)
        engine.call(lambda: None)  # between two of its steps
        found = ask(engine)
        running.wait(60)
    assert found[0].cached_tokens == CACHED


def test_numbers_that_lie_otherwise_in_the_same_place() -> None:
    """What was computed stays, as nothing tells of it; what is computed is of the numbers now."""
    model = make("llama")
    with opened(model, enable_prefix_caching=False) as engine:
        before = ask(engine)
        weight = model.layers["0"].attn.o_proj.weight
        weight.data = weight.data.t()
        after = ask(engine)
    assert say(after) != say(before)
    with opened(model) as engine:
        assert say(after) == say(ask(engine))


def test_a_norm_whose_class_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    plain = RMSNorm.forward
    with opened(model, enable_prefix_caching=False) as engine:
        before = ask(engine)
        monkeypatch.setattr(RMSNorm, "forward", lambda self, x: plain(self, x) * -3)
        after = ask(engine)
    assert say(after) != say(before)
    with opened(model) as engine:
        assert say(after) == say(ask(engine))


def test_a_hook_between_the_steps_of_beams() -> None:
    """A search among requests pauses before every step: what is put in then is called."""
    model, called, runs, seen = make("llama"), [0], [0], threading.Event()

    def notice(*_: Any) -> None:
        runs[0] += 1
        if runs[0] == 8:  # blocks have been looked at
            seen.set()

    model.register_forward_pre_hook(notice)

    def count(*_: Any) -> None:
        called[0] += 1

    with opened(model) as engine:
        config = GenerationConfig(max_new_tokens=30, num_beams=2, eos_token_id=())
        handle = engine.submit(Request(PROMPT[:4], config))
        assert seen.wait(60)
        was_done = engine.call(
            lambda: (model.layers["0"].register_forward_hook(count), handle.done)[1]
        )
        handle.wait(60)
    assert not was_done
    assert called[0] > 0


def test_a_call_from_the_engines_own_thread() -> None:
    """Who watches an answer may change the model: the tokens after that are of the changed one."""
    model, called, told = make("llama"), [0], [0]

    def count(*_: Any) -> None:
        called[0] += 1

    with opened(model) as engine:
        handle = engine.submit(Request(PROMPT[:4], greedy(max_new_tokens=12)))

        def watch() -> None:
            told[0] += 1
            if told[0] == 4:
                engine.call(lambda: model.layers["0"].register_forward_hook(count))

        handle.watch(watch)
        handle.wait(60)
    assert called[0] >= 8


def test_a_draft_that_is_changed() -> None:
    """The small model's blocks are looked at as well, where memory of old weights is gone."""
    model, small, called = make("llama"), make("llama"), [0]

    def count(*_: Any) -> None:
        called[0] += 1

    with opened(model, draft=small) as engine:
        before = ask(engine)
        put = small.layers["0"].register_forward_hook(count)
        assert say(ask(engine)) == say(before)
        assert called[0] > 0
        put.remove()
        for parameter in small.parameters():
            parameter.data = torch.zeros_like(parameter)
        assert say(ask(engine)) == say(before)
        blocks = engine._requests._packed._draft._step._native._segments  # type: ignore[union-attr]
        assert blocks[0].layers[0].attn.query.weight == (
            small.layers["0"].attn.q_proj.weight.data_ptr()
        )
