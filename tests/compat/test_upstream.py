"""Module paths of the old packages: each resolves, or names its replacement."""

from __future__ import annotations

import importlib
import math
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

from bmforge.compat import upstream
from bmforge.compat.names import PAGES
from bmforge.compat.upstream import UpstreamFinder, install, module_paths


@pytest.mark.parametrize("package", PAGES)
def test_every_module_path_resolves_or_says_what_replaces_it(package: str) -> None:
    assert len(module_paths(package)) >= 9
    for path in sorted(module_paths(package)):
        error = import_error(f"bmforge.compat.{package}.{path}")
        assert error is None or type(error) is ImportError, path
        assert error is None or re.search(r"was removed\. (Use|Not needed)", str(error))


def import_error(name: str) -> ImportError | None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("path", "name", "home"),
    [
        ("openprompt.plms.seq2seq", "T5TokenizerWrapper", "openprompt.plms"),
        ("openprompt.prompts.manual_template", "ManualTemplate", "openprompt.prompts"),
        ("opendelta.delta_models.adapter", "AdapterModel", "opendelta.delta_models"),
        ("opendelta.basemodel", "DeltaBase", "opendelta.basemodel"),
        ("model_center.layer.linear", "Linear", "model_center.layer"),
        ("model_center.model.config.bert_config", "BertConfig", "model_center.model"),
        ("model_center.tokenizer.bert_tokenizer", "BertTokenizer", "model_center.tokenizer"),
        ("bmtrain.loss.cross_entropy", "FusedCrossEntropy", "bmtrain.loss"),
        ("bmtrain.optim.adam_offload", "AdamOffloadOptimizer", "bmtrain.optim"),
        ("bmtrain.lr_scheduler.noam", "Noam", "bmtrain.lr_scheduler"),
        ("bmcook.utils.config", "ConfigParser", "bmcook"),
    ],
)
def test_a_class_is_the_same_by_both_paths(path: str, name: str, home: str) -> None:
    by_old_path = getattr(importlib.import_module(f"bmforge.compat.{path}"), name)
    assert by_old_path is getattr(importlib.import_module(f"bmforge.compat.{home}"), name)


def test_a_removed_name_is_an_import_error_with_advice() -> None:
    with pytest.raises(ImportError, match=r"optim\._function was removed\. Use bmt\.optim"):
        importlib.import_module("bmforge.compat.bmtrain.optim._function")
    with pytest.raises(ImportError, match=r"does not exist in bmforge\. See docs/"):
        exec("from bmforge.compat.bmtrain.nn.linear import never_there")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_function_of_a_module_without_a_file(value: float, dtype: torch.dtype) -> None:
    import bmforge.compat.bmtrain.loss._function as functions

    tensor, out = torch.ones(1000, dtype=dtype), torch.ones((), dtype=torch.uint8)
    tensor[417] = value
    functions.has_inf_nan(tensor, out)
    assert out.item() == (not math.isfinite(value))


def test_attributes_and_imports_of_unknown_names() -> None:
    import bmforge.compat.bmtrain as bmt

    assert not hasattr(bmt, "never_there")
    assert bmt.block_layer.TransformerBlockList is bmt.TransformerBlockList
    with pytest.raises(ImportError, match="does not exist in bmforge"):
        exec("from bmforge.compat.bmtrain.runtime import never_there")
    assert pickle.loads(pickle.dumps(bmt.lr_scheduler.Noam)) is bmt.lr_scheduler.Noam


def test_other_module_paths_stay_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("bmforge.compat.bmtrain.never_there")
    install()
    assert sum(isinstance(finder, UpstreamFinder) for finder in sys.meta_path) == 1


def test_directory_without_files_does_not_hide_a_module(tmp_path: Path) -> None:
    """An update in place leaves the directory of a package that is now a single file."""
    (tmp_path / "prompts" / "__pycache__").mkdir(parents=True)
    spec = UpstreamFinder().find_spec("bmforge.compat.openprompt.prompts", [str(tmp_path)])
    assert spec is not None
    assert isinstance(spec.loader, upstream._EmptyLoader)
