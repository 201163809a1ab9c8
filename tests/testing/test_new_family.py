"""`dev/new_family` writes a family that works as written when its shape is one of the house's."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "dev" / "new_family"
CHECKED = "outputs or gradients or conversion or cached or packed"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    loader = SourceFileLoader("new_family", str(SCRIPT))
    spec = spec_from_loader("new_family", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_transformers_tables_tell_the_kind(script: ModuleType) -> None:
    """Those that can be two things are what they were trained as."""
    kinds = {
        "decoder": ("mistral", "gpt2", "opt", "qwen3"),
        "encoder": ("bert", "electra", "camembert", "data2vec-text", "xlm-roberta"),
        "seq2seq": ("t5", "umt5", "longt5", "bart", "pegasus"),
    }
    assert {kind: {script.kind_of(t) for t in types} for kind, types in kinds.items()} == {
        kind: {kind} for kind in kinds
    }
    with pytest.raises(SystemExit, match="no language model of the type 'vit'"):
        script.kind_of("vit")


def lefts(text: str) -> set[str]:
    """What a written family leaves to its author, but for the published sizes."""
    return set(re.findall(r"# left: (.+)", text)) - {"the published sizes"}


@pytest.mark.parametrize(
    ("hf", "left"),
    [
        ("iquestcoder", ()),
        ("data2vec-text", ()),
        ("mt5", ()),
        ("olmo2", ('WeightRule("", "model.layers.{i}.post_feedforward_layernorm.weight"),',)),
        ("mistral", ("config field sliding_window = 4096",)),
        ("ernie", ("config field task_type_vocab_size = 3",)),
        ("electra", ('WeightRule("", "electra.embeddings_project.weight")',)),
        (
            "umt5",
            (
                'WeightRule("", "encoder.block.{i}.layer.0.SelfAttention'
                '.relative_attention_bias.weight")',
            ),
        ),
        ("longt5", ("config field encoder_attention_type = 'local'",)),
    ],
)
def test_what_has_no_place_is_said(
    hf: str, left: tuple[str, ...], script: ModuleType, tmp_path: Path
) -> None:
    """A family of the house's shapes leaves nothing; of others each weight and field is named."""
    model, test = script.write_family("Fresh", hf, tmp_path)
    text = model.read_text("utf-8")
    assert lefts(text) >= set(left)
    assert bool(lefts(text)) == bool(left)
    ast.parse(text)
    ast.parse(test.read_text("utf-8"))


def test_the_family_is_entered_once_and_nothing_is_overwritten(
    script: ModuleType, tmp_path: Path
) -> None:
    """The table of families gets a row and the imports for type checkers a line, in order."""
    models = tmp_path / "bmforge" / "models"
    models.mkdir(parents=True)
    tables = [models / "families.py", models / "__init__.py"]
    for table in tables:
        shutil.copy(ROOT / "bmforge" / "models" / table.name, table)
    before = [table.read_text("utf-8").splitlines() for table in tables]
    (model, _) = script.write_family("Iquest", "iquestcoder", tmp_path)
    after = [table.read_text("utf-8").splitlines() for table in tables]
    rows = [
        '    "iquest": ("Iquest",),',
        "    from bmforge.models.iquest import Iquest, IquestConfig",
    ]
    for old, new, row in zip(before, after, rows, strict=True):
        assert [line for line in new if line not in old] == [row]
        start = row.split("iquest")[0]
        alike = [line for line in new if line.startswith(start) and '"""' not in line]
        assert len(alike) > 30
        assert alike == sorted(alike)
    written = [path.read_bytes() for path in (model, *tables)]
    with pytest.raises(SystemExit, match="is there already"):
        script.write_family("Iquest", "iquestcoder", tmp_path)
    assert [path.read_bytes() for path in (model, *tables)] == written


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "hf", "passed"),
    [("Quest", "iquestcoder", 17), ("Data2Vec", "data2vec-text", 11), ("MultiT5", "mt5", 11)],
)
def test_a_family_of_the_houses_shapes_passes_as_written(
    name: str, hf: str, passed: int, tmp_path: Path
) -> None:
    """Outputs, gradients and conversion of the written family are transformers'."""
    command = [sys.executable, str(SCRIPT), name, "--hf", hf, "--root", str(tmp_path)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    models = tmp_path / "bmforge" / "models"
    test = tmp_path / "tests" / "parity" / f"test_{name.lower()}.py"
    # It is no part of the package here, so its module is found by path.
    text = test.read_text("utf-8").replace(f"bmforge.models.{name.lower()}", name.lower())
    test.write_text(text, "utf-8")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    paths = os.pathsep.join([str(models), str(ROOT)])
    done = subprocess.run(
        [*pytest, "-k", CHECKED],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{passed} passed" in done.stdout
