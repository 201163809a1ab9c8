"""Streaming some blocks: any split, tier and kind of blocks gives the bits of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.memory.copies import CopyEngine, make_copy_engine
from bmforge.memory.packed import packed_bytes
from bmforge.memory.resident import spread_resident
from bmforge.memory.streaming import Streamer, stream_blocks_
from bmforge.models import T5, Llama, LlamaConfig, Mixtral, MixtralConfig, T5Config
from bmforge.models.changes import Change
from bmforge.surgery import find_modules, persistent_tensors
from bmforge.testing import assert_equal_trees

HOST = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
}
IDS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))


def make_llama() -> Any:
    return Llama.from_config(LlamaConfig(**SIZES, num_layers=6, num_kv_heads=2, max_seq_len=64))


def make_unlike() -> Any:
    """Blocks of other widths, one without attention, one of experts."""
    model = make_llama()
    model.change_(Change("resize", ("layers.1",), {"intermediate_size": 16}))
    model.change_(Change("resize", ("layers.2",), {"attn": False}))
    model.change_(Change("resize", ("layers.4",), {"num_experts": 4}))
    return model


def make_mixtral() -> Any:
    return Mixtral.from_config(
        MixtralConfig(**SIZES, num_layers=4, num_kv_heads=2, num_experts=4, experts_per_token=2)
    )


def make_t5() -> Any:
    return T5.from_config(T5Config(**SIZES, num_layers=3))


MAKERS = {"llama": make_llama, "unlike": make_unlike, "mixtral": make_mixtral, "t5": make_t5}


def block_names(model: Any) -> list[str]:
    return list(find_modules(model, globs=model.layout_rules().recompute_units))


def stream(
    model: Any, resident: list[str], engine: CopyEngine | None = None, **options: Any
) -> tuple[Any, Streamer, list[str]]:
    """A copy of a model of which some blocks come and go, and the names that were read."""
    kept = {n: t.detach().clone() for n, t in persistent_tensors(model).items()}
    streamed, reads = copy.deepcopy(model), []

    def read(name: str, out: Tensor) -> None:
        reads.append(name)
        out.copy_(kept[name])

    names = block_names(streamed)
    streamer = stream_blocks_(
        streamed, read, device=HOST, blocks=names, resident=resident, engine=engine, **options
    )
    return streamed, streamer, reads


def step(model: Any) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("tier", ["disk", "host", "both"])
def test_any_split_is_the_whole(kind: str, tier: str) -> None:
    model = MAKERS[kind]().eval()
    names = block_names(model)
    want, text = step(model), generate(model, IDS, max_new_tokens=5, eos_token_id=())
    for count in range(len(names)):
        resident = [names[i] for i in spread_resident(len(names), count)]
        on_host = {"disk": [], "host": names, "both": names[::2]}[tier]
        streamed, streamer, _ = stream(model, resident, on_host=on_host)
        assert torch.equal(generate(streamed, IDS, max_new_tokens=5, eos_token_id=()), text)
        assert_equal_trees(step(streamed), want)
        assert torch.equal(generate(streamed, IDS, max_new_tokens=5, eos_token_id=()), text)
        streamer.close()


def test_host_tier_reads_once() -> None:
    """What waits in host memory is read when it is first needed, and after `forget` anew."""
    model = make_llama().eval()
    names = block_names(model)
    streamed, streamer, reads = stream(model, [names[0]], on_host=names[1:])
    for _ in range(2):
        generate(streamed, IDS, max_new_tokens=4)
        step(streamed)
    assert sorted(reads) == sorted(streamer.names)
    streamer.forget()
    generate(streamed, IDS, max_new_tokens=1)
    assert len(reads) <= 2 * len(streamer.names)
    assert len(reads) > len(streamer.names)
    streamer.close()


def computed_and_asked(engine: CopyEngine) -> tuple[list[int], list[int]]:
    engine.run(lambda: None).wait()
    found: tuple[list[int], list[int]] = ([], [])
    for event in engine.events:
        if event.kind == "computes":
            found[0].append(int(event.label.rpartition(" ")[2]))
        if event.kind == "submitted" and event.label.startswith("read"):
            found[1].append(int(event.label.rpartition(" ")[2]))
    return found


def test_an_encoder_is_read_once_a_text() -> None:
    """While the decoder writes token by token, none of the encoder's blocks comes again."""
    engine = make_copy_engine(HOST, records=True)
    streamed, streamer, _ = stream(make_t5().eval(), [], engine)
    for _ in range(3):
        generate(streamed, IDS, max_new_tokens=9, eos_token_id=())
    computed, asked = computed_and_asked(engine)
    assert computed == ([0, 1, 2] + [3, 4, 5] * 9) * 3
    # Nothing is known when the first token is written; two blocks come that are not needed then.
    assert sum(block < 3 for block in asked) == 3 * 3 + 2
    assert sum(block >= 3 for block in asked) <= 3 * (9 * 3 + 2)
    streamer.close()


def test_without_gradients_each_block_is_read_once_a_pass() -> None:
    """And nothing is recomputed; with gradients everything is, once."""
    engine = make_copy_engine(HOST, records=True)
    streamed, streamer, _ = stream(make_llama().eval(), ["layers.0", "layers.3"], engine)
    with torch.no_grad():
        for _ in range(3):
            streamed(input_ids=IDS)
    computed, asked = computed_and_asked(engine)
    assert computed == [0, 1, 2, 3] * 3
    assert asked[:12] == computed
    assert len(asked) <= 12 + 2  # what the next pass begins with is on its way
    step(streamed)
    assert computed_and_asked(engine)[0][12:] == [0, 1, 2, 3, 3, 2, 1, 0]
    streamer.close()


def test_a_slot_fills_while_resident_blocks_run() -> None:
    """A block that has run makes room at once: both slots are asked for before resident blocks."""
    engine = make_copy_engine(HOST, records=True)
    names = [f"layers.{i}" for i in (1, 2, 4, 5)]
    model = make_llama().eval()
    streamed, streamer, _ = stream(model, names, engine)
    streamed.layers["1"].register_forward_hook(lambda *_: engine.note("resident", "layers.1"))
    with torch.no_grad():
        streamed(input_ids=IDS)
        streamed(input_ids=IDS)
    kinds = [(e.kind, e.label) for e in engine.events if e.kind in ("submitted", "resident")]
    first = kinds.index(("resident", "layers.1"))
    assert ("submitted", "read block 1") in kinds[:first]
    streamer.close()


def test_what_stays_is_trained_in_place() -> None:
    """Norms that stay keep their own memory, get the same gradients, and may be stepped."""
    model = make_llama().eval()
    streamed, streamer, reads = stream(model, [], stays=lambda name, tensor: tensor.dim() < 2)
    for one in (model, streamed):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name.endswith("norm.weight"))
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            step(one)
            optimizer.step()
    assert_equal_trees(step(streamed), step(model))
    assert not any("norm" in name for name in reads)
    streamer.close()


def test_inputs_get_gradients() -> None:
    """Through frozen blocks that come and go, to what goes into the model."""
    model = make_llama().eval().requires_grad_(False)
    found = []
    for one in (model, stream(model, ["layers.1"])[0]):
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        one(inputs_embeds=x).logits.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])


def test_slots_are_of_the_largest_that_moves() -> None:
    """A large block that stays takes no room in the slots."""
    model = make_unlike().eval()
    names = block_names(model)
    sizes = {
        n: sum(packed_bytes(t) for t in persistent_tensors(model.get_submodule(n)).values())
        for n in names
    }
    largest = max(sizes, key=lambda name: sizes[name])
    _, streamer, _ = stream(model, [largest])
    moved = [size for name, size in sizes.items() if name != largest]
    assert [slot.memory.numel() for slot in streamer._slots] == [max(moved)] * 2
    streamer.close()


def test_a_failed_read_is_asked_for_again() -> None:
    """What went wrong is raised where the block is needed; the next call reads anew."""
    model = make_llama().eval()
    kept = {n: t.detach().clone() for n, t in persistent_tensors(model).items()}
    fails = [True]

    def read(name: str, out: Tensor) -> None:
        if fails[0] and name.startswith("layers.3"):
            raise OSError("the disk is gone")
        out.copy_(kept[name])

    streamed = copy.deepcopy(model)
    streamer = stream_blocks_(streamed, read, device=HOST)
    with pytest.raises(OSError, match="gone"):
        generate(streamed, IDS, max_new_tokens=1)
    fails[0] = False
    want = generate(model, IDS, max_new_tokens=3)
    assert torch.equal(generate(streamed, IDS, max_new_tokens=3), want)
    streamer.close()


def test_names_that_are_no_blocks() -> None:
    model = make_llama()
    with pytest.raises(ConfigError, match=r"layers\.9"):
        stream_blocks_(model, lambda name, out: None, device=HOST, resident=["layers.9"])
    names = block_names(model)
    with pytest.raises(ConfigError, match="no repeated blocks"):
        stream_blocks_(model, lambda name, out: None, device=HOST, resident=names)


class _Foreign(nn.Module):
    """Not one of ours: a list of blocks of which two hold other things."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in "1234")
        self.blocks[1][1] = nn.Identity()
        self.blocks[2][0] = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_any_module() -> None:
    torch.manual_seed(0)
    model, x = _Foreign(), torch.randn(3, 8)
    kept = {n: t.detach().clone() for n, t in persistent_tensors(model).items()}
    want = model(x)
    streamer = stream_blocks_(model, lambda name, out: out.copy_(kept[name]), device=HOST)
    for _ in range(2):
        assert torch.equal(model(x), want)
    assert sorted(streamer.names) == sorted(kept)
    streamer.close()
