"""Learning by a prompt on every layout is learning on one process; one family per kind."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from prompt_layouts import KINDS, learn

from bmforge.memory.streaming import stream_blocks_
from bmforge.parallel import Layout
from bmforge.surgery import find_modules, persistent_tensors
from bmforge.testing import assert_close, run_distributed
from bmforge.testing.prompt_suite import PROMPT, PROMPTED, open_prompted
from bmforge.tune.prompt import ManualVerbalizer, PromptClassifier, Template

LAYOUTS = {
    "zero-3": (Layout(zero=3), False),
    "tensor": (Layout(tp=2, sequence_parallel=True), False),
    "pipeline": (Layout(pp=2), False),
    "context": (Layout(cp=2), False),
    "recompute": (Layout(zero=3), True),
}


@cache
def on_one(kind, join):
    (found,) = run_distributed(learn, 1, kind, Layout(), join)
    assert found["loss"] > 0
    assert bool(found["grad/embed.prompt.weight"].any(1).all())
    return found


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_learning_on_a_layout(kind, layout):
    where, recompute = LAYOUTS[layout]
    join = "joint" if layout == "zero-3" else "mean"
    want, seen = on_one(kind, join), set()
    for got in run_distributed(learn, 2, kind, where, join, recompute):
        assert_close(got, {name: want[name] for name in got})
        seen |= set(got)
    assert seen == set(want)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_blocks_learn_alike(kind):
    model, tokenizer = open_prompted(*KINDS[kind])
    template = Template(PROMPT, tokenizer, model)
    words = ManualVerbalizer([["good", "fine"], ["bad"]], tokenizer, join="joint")
    classifier = PromptClassifier(model, template, words)
    batch = classifier.collate([classifier.ask(one) for one in PROMPTED], [0, 1])

    def step():
        model.zero_grad()
        loss = classifier(**batch).loss
        loss.backward()
        return {"loss": loss.detach().clone(), "rows": template.soft_parameters[0].grad.clone()}

    want = step()
    kept = copy.deepcopy({n: t.detach() for n, t in persistent_tensors(model).items()})
    blocks = find_modules(model, globs=model.layout_rules().recompute_units)
    streamer = stream_blocks_(
        model, lambda name, out: out.copy_(kept[name]), device=torch.device("cpu"),
        blocks=list(blocks),
    )  # fmt: skip
    assert_close(step(), want)
    streamer.close()
