"""What a step sends on each layout, counted, against a closed form of the model's sizes.

The closed forms are those of docs/explanation/layouts.md, "What a layout communicates". Each is a
list of single calls, so that the size of every one is compared, and not only their sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bmforge import models
from bmforge.errors import DistributedError
from bmforge.parallel import Layout, init_distributed, parallelize, run_step
from bmforge.parallel.collectives import exchange_rows, gather_tokens, sum_backward, sum_forward
from bmforge.testing import run_distributed
from bmforge.testing.traffic import Communication, Traffic, Volume, add_up
from bmforge.train.optim.build import clip_grad_norm_

# No size divides by another where padding could hide: 2 rows of 9 tokens, 29 words, 27 features.
BATCH, LENGTH = 2, 9
COMMON: dict[str, Any] = {"vocab_size": 29, "hidden_size": 20, "num_layers": 3, "num_heads": 2}
LLAMA: dict[str, Any] = {**COMMON, "intermediate_size": 27, "num_kv_heads": 1, "head_dim": 10}
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "output_router_logits": True}
CONFIGS = {
    "gpt2": models.GPT2Config(**COMMON, max_seq_len=16),
    "gpt2-untied": models.GPT2Config(**COMMON, max_seq_len=16, tie_word_embeddings=False),
    "llama": models.LlamaConfig(**LLAMA),
    "llama-tied": models.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "mixtral": models.MixtralConfig(**LLAMA, **EXPERTS),
}
CLASSES: dict[str, Any] = {"gpt2": models.GPT2, "llama": models.Llama, "mixtral": models.Mixtral}
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "zero3x2": (2, Layout(zero=3)),
    "zero2x2": (2, Layout(zero=2)),
    "zero0x2": (2, Layout(zero=0)),
    "zero3x3": (3, Layout(zero=3)),
    "hsdp2x2": (4, Layout(zero=3, dp_replicate=2)),
    "tp2": (2, Layout(tp=2)),
    "tp2-sp": (2, Layout(tp=2, sequence_parallel=True)),
    "tp2-zero3x2": (4, Layout(tp=2, zero=3)),
    "tp2-sp-zero2x2": (4, Layout(tp=2, zero=2, sequence_parallel=True)),
    "cp2": (2, Layout(cp=2)),
    "cp3-zero2": (3, Layout(cp=3, zero=2)),
    "pp2": (2, Layout(pp=2, pp_cut=(2, 1))),
    "pp2-zero2x2": (4, Layout(pp=2, pp_cut=(2, 1), zero=2)),
    "pp2-zero3x2": (4, Layout(pp=2, pp_cut=(2, 1), zero=3)),
    "ep2": (2, Layout(ep=2)),
    "ep2-zero2": (2, Layout(ep=2, zero=2)),
}
FLOAT, INT = 4, 8  # bytes of parameters and activations, and of counts
HEADER = INT * (1 + 16 * 9)  # of a message between stages: 16 tensors, 9 numbers each

Calls = Iterator[Communication]
# Unit of ZeRO ("" is the root) -> parameter -> shape.
Units = dict[str, dict[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    """One measured step of a family on a layout."""

    family: str
    name: str
    recompute: bool = False
    micro_batches: int = 1

    def __str__(self) -> str:
        more = "-recompute" * self.recompute + f"-{self.micro_batches}micro"
        return f"{self.family}-{self.name}{more}"

    @property
    def config(self) -> Any:
        return CONFIGS[self.family]

    @property
    def place(self) -> tuple[int, Layout]:
        return LAYOUTS[self.name]

    @property
    def cuts(self) -> tuple[int, int]:
        """Over how many processes ZeRO shards, and how many copies of the shards there are."""
        world, layout = self.place
        rest = world // (layout.tp * layout.pp * layout.dp_replicate)
        return (rest, layout.dp_replicate) if layout.zero else (1, rest)

    def build(self) -> models.Model:
        return CLASSES[self.config.family].from_config(self.config, device="meta")


def measure(case: Case) -> tuple[Counter[Communication], Counter[Communication]]:
    """Return the calls of forward and backward, and those of clipping."""
    init_distributed()
    model = case.build()
    parallelize(model, case.place[1], recompute=case.recompute)
    models.init_weights_(model, seed=3)
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % case.config.vocab_size
    batches = [{"input_ids": ids, "labels": ids}] * case.micro_batches

    def run(batch: Any) -> Tensor:
        return model(**batch, num_items_in_batch=16.0).loss

    run_step(model, run, batches)  # the first one connects the stages of a pipeline as well
    with Traffic() as step:
        run_step(model, run, batches)
    with Traffic() as clip:
        clip_grad_norm_(model, 1.0)
    return step.calls, clip.calls


def part(length: int, size: int, rank: int) -> int:
    """Rows of a process where a dim is cut into equal parts, the last one shorter."""
    width = -(-length // size)
    return max(0, min(width, length - rank * width))


def cut_dim(name: str, kv_heads: int, tp: int) -> int | None:
    """Return the dim of a parameter that tensor parallelism cuts."""
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in ("k_proj", "v_proj") and kv_heads % tp:
        return None
    if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head"):
        return 0
    return 1 if last in ("o_proj", "down_proj") and leaf == "weight" else None


def units_of(case: Case, tp_rank: int = 0) -> Units:
    """Return what a process holds of every unit after tensor and before ZeRO's cut."""
    kv_heads, tp = case.config.num_kv_heads, case.place[1].tp
    units: Units = {}
    for name, parameter in case.build().named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        shape = list(parameter.shape)
        dim = cut_dim(name, kv_heads, tp)
        if dim is not None:
            shape[dim] = part(shape[dim], tp, tp_rank)
        units.setdefault(unit, {})[name] = tuple(shape)
    return units


def hidden_bytes(config: Any, tokens: int) -> int:
    """Bytes of the hidden states of a batch whose rows have so many tokens."""
    return BATCH * tokens * config.hidden_size * FLOAT


def zero_calls(case: Case, units: Units, gathers: int = 1, reduces: int = 1) -> Calls:
    """ZeRO: every unit is gathered and its gradients reduced; ZeRO-3 gathers blocks twice.

    A block's recomputation finds its parameters gathered. The root stays gathered for backward. A
    parameter is padded to as many rows as the processes divide.
    """
    shards, copies = case.cuts
    for unit, shapes in units.items():
        shard = sum(-(-s[0] // shards) * math.prod(s[1:]) for s in shapes.values()) * FLOAT
        if shards > 1:
            again = 2 if case.place[1].zero == 3 and unit else 1
            yield from [Communication("all_gather", shard)] * (again * gathers)
            yield from [Communication("reduce_scatter", shard * shards)] * reduces
        if copies > 1:
            yield from [Communication("all_reduce", shard)] * reduces


def vocabulary_calls(config: Any, tp: int) -> Calls:
    """A divided vocabulary: the embedding's sum, the loss of every token, the head's gradient.

    Keys and values of fewer heads than processes are whole on each, and their gradients summed.
    """
    column = BATCH * LENGTH * FLOAT
    yield from [Communication("all_reduce", hidden_bytes(config, LENGTH))] * 2
    yield from (
        Communication("all_reduce", column),
        Communication("all_reduce", 2 * column),
    )  # maximum, sums
    if config.num_kv_heads % tp:
        weight = config.num_kv_heads * config.head_dim * config.hidden_size * FLOAT
        yield from [Communication("all_reduce", weight)] * (2 * config.num_layers)


def tensor_calls(config: Any, tp: int, recompute: bool) -> Calls:
    """Tensor parallelism: two sums of hidden states per block each way.

    Recomputing ends with the last tensor that backward needs, before the block's last sum.
    """
    yield from vocabulary_calls(config, tp)
    sums = 4 + recompute
    yield from [Communication("all_reduce", hidden_bytes(config, LENGTH))] * (
        sums * config.num_layers
    )


def sequence_calls(config: Any, tp: int, recompute: bool, units: Units) -> Calls:
    """With sequence parallelism: a gather and a reduce-scatter per part and direction.

    Recomputing gathers, scatters and gathers again. The gradients of what is whole on all but used
    on divided tokens are summed: of norms, and of biases behind a sum.
    """
    yield from vocabulary_calls(config, tp)
    share = hidden_bytes(config, -(-LENGTH // tp))
    gather, scatter = (
        Communication("all_gather", share),
        Communication("reduce_scatter", share * tp),
    )
    yield from [gather] * ((4 + 2 * recompute) * config.num_layers)
    yield from [scatter] * ((4 + recompute) * config.num_layers)
    yield from [gather] * 2  # backward of the division before the blocks; behind them
    ends = ("_norm.weight", "_norm.bias", "o_proj.bias", "down_proj.bias")
    for shapes in (shapes for unit, shapes in units.items() if unit):
        whole = (shape for name, shape in shapes.items() if name.endswith(ends))
        yield from (Communication("all_reduce", math.prod(shape) * FLOAT) for shape in whole)


def context_calls(config: Any, cp: int, recompute: bool) -> Calls:
    """Context parallelism: keys and values of every block, and the last hidden states.

    A row is cut into 2 cp chunks, the first ones a token longer where it does not divide; process r
    has chunks r and 2 cp - 1 - r. All send as many tokens as the one with the most.
    """
    base, rest = divmod(LENGTH, 2 * cp)
    width = 2 * base + (rest > 0) + (rest > cp)
    pairs = BATCH * config.num_kv_heads * width * 2 * config.head_dim * FLOAT
    yield from [Communication("all_gather", pairs)] * ((1 + recompute) * config.num_layers)
    yield from [Communication("reduce_scatter", cp * pairs)] * config.num_layers
    yield Communication("all_gather", hidden_bytes(config, width))
    yield Communication("reduce_scatter", cp * hidden_bytes(config, width))


def stage_of(units: Units, is_last: bool, tied: bool) -> Units:
    """Return what a stage of two has: blocks 0 and 1 behind the embeddings, or 2 and the head."""
    here = {unit: shapes for unit, shapes in units.items() if (unit == "layers.2") == is_last}
    names = ("norm.", "lm_head.", *(["embed."] if tied else [])) if is_last else ("embed",)
    here[""] = {n: s for n, s in units[""].items() if n.startswith(names)}
    return here


def pipeline_calls(case: Case, units: Units, rank: int) -> Calls:
    """A pipeline of two stages, of a whole step: hidden states there, their gradients back.

    ZeRO-2 keeps parameters gathered for all micro-batches, and gradients are reduced once. What an
    embedding that both stages have gets on each is summed, of ZeRO's shard.
    """
    config, count, shards = case.config, case.micro_batches, case.cuts[0]
    for message in (
        Communication("send", HEADER),
        Communication("send", hidden_bytes(config, LENGTH)),
    ):
        yield from [message, message._replace(kind="recv")] * count
    tied, (world, layout) = config.tie_word_embeddings, case.place
    if tied:
        rows = part(config.vocab_size, shards, rank % shards)
        yield Communication("all_reduce", rows * config.hidden_size * FLOAT)
    stage = stage_of(units, is_last=rank >= world // 2, tied=tied)
    yield from zero_calls(case, stage, gathers=count if layout.zero == 3 else 1)


def expected_step(case: Case, rank: int) -> Counter[Communication]:
    """Forward and backward of all micro-batches of a step on one process."""
    layout, config = case.place[1], case.config
    units = units_of(case, rank % layout.tp)
    if layout.pp > 1:
        return Counter(pipeline_calls(case, units, rank))
    calls = list(zero_calls(case, units))
    if layout.sequence_parallel:
        calls += sequence_calls(config, layout.tp, case.recompute, units)
    elif layout.tp > 1:
        calls += tensor_calls(config, layout.tp, case.recompute)
    if layout.cp > 1:
        calls += context_calls(config, layout.cp, case.recompute)
    return Counter(calls * case.micro_batches)


def expected_clip(case: Case) -> Counter[Communication]:
    """Clipping sums a number per axis over which a set of parameters is cut, and the stages'.

    Sets are: cut by ZeRO alone, by tensor parallelism as well, experts. With zero=0 FSDP2 has an
    axis of one process, which is summed over like any other.
    """
    layout = case.place[1]
    zero, tp = math.prod(case.cuts) > 1, layout.tp > 1
    count = zero + tp * (1 + zero) + (layout.ep > 1)
    # A pipeline's processes also tell each other the precision of what they have.
    return Counter(
        [Communication("all_reduce", 8)] * count
        + [Communication("all_reduce", 16)] * (layout.pp > 1)
    )


mark_long = partial(pytest.param, marks=pytest.mark.long)
QUICK = [
    Case("gpt2", "zero3x2"),
    Case("llama", "zero3x2", recompute=True),
    Case("gpt2", "zero2x2"),
    Case("llama", "zero0x2"),
    Case("gpt2", "zero3x2", micro_batches=2),
    Case("gpt2", "tp2"),
    Case("llama", "tp2", recompute=True),
    Case("gpt2", "tp2-sp"),
    Case("llama", "tp2-sp", recompute=True),
    Case("gpt2", "tp2-zero3x2"),
    Case("llama-tied", "cp2"),
    Case("gpt2", "pp2", micro_batches=2),
    Case("llama", "pp2", micro_batches=2),
]
LONG = [
    Case(family, name, *more)
    for family in CONFIGS
    for name in LAYOUTS
    for more in ((False, 1), (True, 2))
    if family != "mixtral" and not name.startswith("ep") and Case(family, name, *more) not in QUICK
]


@pytest.mark.parametrize("case", [*QUICK, *map(mark_long, LONG)], ids=str)
def test_step_sends_the_closed_form(case: Case) -> None:
    for rank, (step, clip) in enumerate(run_distributed(measure, case.place[0], case)):
        assert step == expected_step(case, rank)
        assert clip == expected_clip(case)


@pytest.mark.parametrize(
    "case", [Case("mixtral", "ep2"), mark_long(Case("mixtral", "ep2-zero2", True, 2))], ids=str
)
def test_experts_exchange_each_token_k_times(case: Case) -> None:
    """What a process gets for its experts is the router's choice; over all processes it is not."""
    config = case.config
    rows = BATCH * LENGTH * config.experts_per_token * config.hidden_size * FLOAT
    counting = case.micro_batches > 1  # once more forward, to know the loads of the whole step
    times = (1 + case.recompute + counting) * config.num_layers * case.micro_batches  # forwards
    backwards = config.num_layers * case.micro_batches
    units = {
        unit: {name: shape for name, shape in shapes.items() if ".experts." not in name}
        for unit, shapes in units_of(case).items()
    }
    known = Counter([*zero_calls(case, units)] * case.micro_batches)
    # Loads and probabilities of the experts, the tokens, their labels, and how many parts.
    known[Communication("all_reduce", (2 * config.num_experts + 3) * FLOAT)] = 1
    known[Communication("all_to_all", config.num_experts * INT)] = times
    known[Communication("all_to_all", rows)] = times + backwards  # of one's own tokens
    arrived = 0
    for step, clip in run_distributed(measure, 2, case):
        assert known <= step
        volumes = add_up((step - known).elements())
        assert volumes.keys() == {"all_to_all"}
        assert volumes["all_to_all"].number == times + backwards  # of those that came
        arrived += volumes["all_to_all"].num_bytes
        assert clip == expected_clip(case)
    assert arrived == 2 * rows * (times + backwards)


def talk() -> dict[str, Volume]:
    """Issue calls of known sizes in all the ways there are, forward and backward."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    group: Any = dist.group.WORLD
    mesh = init_device_mesh("cpu", (2,))
    six, three = torch.zeros(6), torch.zeros(3)
    pair = [torch.zeros(3), torch.zeros(3)]
    leaf = torch.zeros(2, 6, 1, requires_grad=True)
    with Traffic() as traffic:
        dist.all_reduce(six)
        dist.broadcast(six, 0)
        dist.reduce(six, 0)
        dist.all_gather(pair, three)
        dist.gather(three, pair if rank == 0 else None)
        dist.scatter(three, pair if rank == 0 else None)
        dist.all_to_all_single(torch.zeros(6), six)
        dist.barrier()
        works = [dist.isend(three, other), dist.irecv(pair[0], other)]
        both = dist.P2POp(dist.isend, six, other), dist.P2POp(dist.irecv, torch.zeros(6), other)
        for work in [*works, *dist.batch_isend_irecv(list(both))]:
            work.wait()
        functional.all_reduce(six, "sum", group).sum()
        functional.all_to_all_single_autograd(six, [3, 3], [3, 3], group).sum()
        cut = distribute_tensor(six, mesh, [Shard(0)], src_data_rank=None)
        cut.redistribute(placements=[Replicate()]).to_local().sum()
        x = gather_tokens(leaf, group, summed=True)  # 48 bytes; backward 96
        x = sum_backward(sum_forward(x, group), group)
        x = exchange_rows(x, group, [1, 1], [1, 1])  # 96 bytes each way
        x.sum().backward()
    dist.all_reduce(six)  # no longer counted
    return traffic.volumes


def test_counter_sees_every_way_to_talk() -> None:
    for rank, volumes in enumerate(run_distributed(talk, 2)):
        assert volumes == {
            "all_reduce": Volume(4, 24 + 24 + 96 + 96),
            "broadcast": Volume(1, 24),
            "reduce": Volume(1, 24),
            "all_gather": Volume(3, 12 + 12 + 48),
            "gather": Volume(1, 12),
            "scatter": Volume(1, 24 if rank == 0 else 0),
            "reduce_scatter": Volume(1, 96),
            "all_to_all": Volume(4, 24 + 24 + 96 + 96),
            "barrier": Volume(1, 0),
            "send": Volume(2, 12 + 24),
            "recv": Volume(2, 12 + 24),
        }


def test_counter_refuses_what_it_does_not_know() -> None:
    with torch.library._scoped_library("c10d", "FRAGMENT") as library:
        library.define("whisper(Tensor tensor) -> Tensor")
        library.impl("whisper", torch.clone, "CompositeExplicitAutograd")
        with Traffic(), pytest.raises(DistributedError, match="cannot be counted"):
            torch.ops.c10d.whisper(torch.zeros(1))
