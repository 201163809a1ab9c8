"""Searching a delta: candidates, rounds, going on after a stop, the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import settings
from task_folders import MODELS, write_boolq, write_words

from bmforge.config import config_from_dict, config_to_dict
from bmforge.errors import ConfigError
from bmforge.models import GPT2
from bmforge.recipes import delta_search
from bmforge.recipes.delta_search import (
    SearchConfig,
    find_candidates,
    plan_rounds,
    search_deltas,
)
from bmforge.recipes.inputs.task_data import TaskDataConfig
from bmforge.recipes.registry import find_recipe


def search_config(tmp_path: Path, run: str, search: SearchConfig, **more: Any) -> Any:
    model = tmp_path / "model"
    if not model.exists():
        GPT2.from_config(MODELS["gpt2"]).save_pretrained(model)
        write_words(tmp_path / "words")
        write_boolq(tmp_path)
    recipe = find_recipe("delta-search", str(model))
    data = TaskDataConfig(
        task="BoolQ",
        paths=(str(tmp_path / "BoolQ"),),
        tokenizer=str(tmp_path / "words"),
        seq_len=48,
        global_batch_size=8,
        micro_batch_size=8,
    )
    told = {"run_dir": tmp_path / run, "search": search, "data": data, "train": settings(9), **more}
    return recipe.config(**told)


def test_rounds_halve() -> None:
    assert plan_rounds(9, 90, 3) == [(9, 10), (3, 30), (1, 90)]
    assert plan_rounds(10, 90, 3) == [(10, 10), (3, 30), (1, 90)]
    assert plan_rounds(2, 5, 2) == [(2, 2), (1, 5)]
    assert plan_rounds(1, 5, 2) == [(1, 5)]
    for count in range(1, 40):
        counts = [n for n, _ in plan_rounds(count, 1000, 2)]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1


def test_candidates_fit_the_budget(tmp_path: Path) -> None:
    """What each trains follows from the sizes: hidden 32, two layers."""
    places = ("usual", "attn.q,attn.k,attn.v,attn.o")
    search = SearchConfig(kinds=("lora", "ia3", "compacter"), places=places, sizes=(2, 64))
    found = find_candidates(search_config(tmp_path, "x", search))
    assert {name: one.trained for name, one in found.items()} == {
        "lora-2": 2 * 2 * (4 * 64 + 2 * 160),  # all linear layers; 64 is too large a rank
        "lora-attn.q-attn.k-attn.v-attn.o-2": 4 * 2 * 2 * 64,
        "ia3": 2 * (32 + 32 + 128),
        "ia3-attn.q-attn.k-attn.v-attn.o": 2 * 4 * 32,
    }
    small = dataclasses.replace(search, max_trained=400)
    found = find_candidates(search_config(tmp_path, "x", small))
    assert list(found) == ["ia3", "ia3-attn.q-attn.k-attn.v-attn.o"]
    none = dataclasses.replace(search, max_trained=1)
    with pytest.raises(ConfigError, match="no adapter of the search can be trained"):
        find_candidates(search_config(tmp_path, "x", none))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"kinds": ("lroa",)}, "'lroa'"),
        ({"sizes": ()}, "must not be empty"),
        ({"keep_ratio": 1}, "at least 2"),
    ],
)
def test_what_cannot_be_searched(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SearchConfig(**told)


class StopError(Exception):
    """Ends a search where it is."""


@pytest.mark.long
def test_a_search_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended after every run in turn, it finds what it finds in one go; a page shows all."""
    search = SearchConfig(kinds=("lora", "bitfit", "ia3"), sizes=(2, 4), keep_ratio=2)
    config = search_config(tmp_path, "one", search)
    assert config_from_dict(type(config), config_to_dict(config)) == config
    whole = search_deltas(config)
    state = json.loads((tmp_path / "one" / "search.json").read_text())
    assert state["plan"] == [[4, 2], [2, 4], [1, 9]]
    assert [len(found) for found in state["rounds"]] == [4, 2, 1]
    (best,) = state["rounds"][2]
    first = state["rounds"][0]
    assert set(state["rounds"][1]) == set(sorted(first, key=lambda n: first[n]["loss"])[:2])
    assert whole.step == 9
    tune, runs = delta_search.tune_task, []

    def stopping(one: Any, launch: Any) -> Any:
        result = tune(one, launch)
        runs.append(one.run_dir.name)
        if len(runs) in (2, 5):
            raise StopError
        return result

    monkeypatch.setattr(delta_search, "tune_task", stopping)
    for _ in range(2):
        with pytest.raises(StopError):
            search_deltas(search_config(tmp_path, "two", search))
    search_deltas(search_config(tmp_path, "two", search))
    assert json.loads((tmp_path / "two" / "search.json").read_text()) == state
    assert len(runs) == 7 + 2  # what was stopped before it was written down, once more
    monkeypatch.undo()
    page = (tmp_path / "one" / "search.html").read_text()
    assert all(name in page for name in state["candidates"])
    assert "done" in page
    assert (tmp_path / "one" / "candidates" / best / "export" / "adapter_config.json").exists()
    other = dataclasses.replace(search, sizes=(2,))
    with pytest.raises(ConfigError, match="a search with other"):
        search_deltas(search_config(tmp_path, "two", other))
    data = dataclasses.replace(config.data, dev_split=None)
    with pytest.raises(ConfigError, match="dev_split"):
        search_deltas(search_config(tmp_path, "three", search, data=data))
