"""Import directions, sizes and literals: the rules that keep the house livable, on its source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bmforge"
FILES = sorted(PACKAGE.rglob("*.py"))
GROUND = {
    "batch",
    "errors",
    "config",
    "files",
    "gguf_header",
    "host_memory",
    "host_tuning",
    "html_page",
    "licence_table",
    "licences",
    "logging",
    "native",
    "provenance",
    "surgery",
    "shards",
    "records",
    "device",
    "settings",
    "task_names",
    "threads",
}

# room -> rooms it may import, besides the ground floor and itself
ALLOWED = {
    "nn": set(),
    "memory": set(),
    "tokenizers": set(),
    "models": {"nn", "tokenizers"},
    "data": {"tokenizers"},
    "parallel": {"memory"},
    "train": {"parallel", "memory", "data"},
    "tune": {"nn", "data", "tokenizers"},
    "compress": {"nn", "models"},
    "infer": {"nn", "memory", "parallel", "models", "tune", "compress", "data", "tokenizers"},
    "serve": {"infer", "models", "tokenizers"},
    "testing": {
        *("nn", "tokenizers", "memory", "models", "parallel", "data", "train", "tune"),
        *("compress", "infer"),
    },
    "compat": {"*"},
    "recipes": {"*"},
    "cli": {"*"},
}
FORBIDDEN_ROOMS = {"utils", "common", "misc", "legacy", "experiments"}
DEVICE_WORDS = re.compile(r"\b(cuda|nccl|mps|xpu|hpu|npu|rocm)\b")
FILE_WALL, FUNCTION_WALL, PARAMETER_WALL = 400, 60, 10


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py") if relative.parts else ""


def imported_rooms(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module == "bmforge":
                names |= {f"bmforge.{alias.name}" for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("bmforge.")}


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_in_one_direction(path):
    room = room_of(path)
    rooms = imported_rooms(ast.parse(path.read_text())) - {room, "__version__"}
    if room in GROUND:
        assert rooms <= GROUND, f"the ground floor imports {rooms - GROUND}"
    elif room in ALLOWED and ALLOWED[room] != {"*"}:
        assert rooms <= ALLOWED[room] | GROUND, f"{room} imports {rooms - ALLOWED[room] - GROUND}"


def test_ground_floor_has_no_cycle():
    graph = {
        name: imported_rooms(ast.parse((PACKAGE / f"{name}.py").read_text())) for name in GROUND
    }
    done: set[str] = set()
    while graph:
        free = [name for name, needs in graph.items() if needs - {name} <= done]
        assert free, f"cycle among {sorted(graph)}"
        done |= set(free)
        graph = {n: g for n, g in graph.items() if n not in done}


def test_every_room_is_known_and_says_what_it_is():
    for folder in {p.parent for p in FILES} - {PACKAGE}:
        assert folder.name not in FORBIDDEN_ROOMS
        assert folder.relative_to(PACKAGE).parts[0] in ALLOWED
        init = folder / "__init__.py"
        assert init.exists(), f"{folder} has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} has no docstring"


@pytest.mark.parametrize(
    "folder", sorted({p.parent for p in FILES}), ids=lambda p: str(p.relative_to(ROOT))
)
def test_where_to_start_reading_is_there(folder):
    """Files that a room's docstring names lie in it."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", said):
        there = (folder / name).exists() or (PACKAGE / name).exists()
        assert there, f"{folder.name} speaks of {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= FILE_WALL
    for node in functions(ast.parse(text)):
        length = node.end_lineno - node.lineno + 1
        docstring = ast.get_docstring(node, clean=False)
        length -= docstring.count("\n") + 1 if docstring else 0
        assert length <= FUNCTION_WALL, f"{node.name} is {length} lines long"
        if node.name == "__init__":
            count = len(node.args.args + node.args.kwonlyargs) - 1
            assert count <= PARAMETER_WALL, f"a constructor at line {node.lineno} takes {count}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_devices_are_named_in_one_file(path):
    if path.name == "device.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            docstring = "\n" in node.value or " " in node.value
            assert docstring or not DEVICE_WORDS.search(node.value), f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert not DEVICE_WORDS.fullmatch(node.attr), f"line {node.lineno}"


def assigned(tree: ast.AST) -> list[ast.Attribute]:
    """Return the attributes that are assigned to, by a statement or by `setattr` with a name."""
    found: list[ast.Attribute] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "object.__setattr__",
        ):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                found.append(ast.Attribute(owner, name.value, lineno=node.lineno))
    return found


def forward_patches(tree: ast.AST) -> list[int]:
    """Return the lines that replace a module's forward."""
    lines = [node.lineno for node in assigned(tree) if node.attr == "forward"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            key = node.slice
            if isinstance(key, ast.Constant) and key.value == "forward":
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_forwards_are_replaced_in_one_file(path):
    lines = forward_patches(ast.parse(path.read_text()))
    assert path.name == "surgery.py" or not lines, f"use surgery.wrap_forward_: lines {lines}"


@pytest.mark.parametrize(
    "line",
    [
        "block.forward = partial(checkpoint, block.forward)",
        "a.b.forward, x = f, 1",
        'setattr(module, "forward", f)',
        'module.__dict__["forward"] = f',
    ],
)
def test_a_patched_forward_would_be_seen(line):
    assert forward_patches(ast.parse(line))
    assert not forward_patches(ast.parse("y = module.forward(x)"))


TENSOR_NAMES = {"parameter", "param", "p", "tensor", "weight", "bias", "buffer"}
MODEL_NAMES = {"model", "root"}
# What torch lets everybody set.
TENSOR_SLOTS = {"data", "grad", "requires_grad"}
# BMTrain's distributed parameters are a kind of their own: these two are what makes one.
OLD_SURFACE = {"group", "gather", "gather_all", "tp_gather"}  # what BMTrain's parameters have
OWN_KIND = (
    ("compat/bmtrain/parameter.py", "compat/bmtrain/param_init.py"),
    {"origin", "is_empty", "is_summed", *OLD_SURFACE},
)


def last_name(node: ast.AST) -> str:
    """Return what an expression ends with: `parameter` for both `parameter` and `a.parameter`."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def put_on(tree: ast.AST, names: set[str], types: set[str]) -> list[tuple[int, str]]:
    """Return (line, attribute) of what is assigned to attributes of things with these names.

    Other names for the same thing count (`target = parameter`), and so do arguments of these types;
    arguments with one of the names and a type of another kind do not.
    """
    found: list[tuple[int, str]] = []
    scopes: list[ast.AST] = [*functions(tree)] or [tree]
    for scope in scopes:
        watched = set(names)
        for node in ast.walk(scope):
            if isinstance(node, ast.arg) and node.annotation is not None:
                kind = ast.unparse(node.annotation)
                if kind in types:
                    watched.add(node.arg)
                elif kind != "Any":
                    watched.discard(node.arg)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if last_name(node.value) in watched and isinstance(targets[0], ast.Name):
                    watched.add(targets[0].id)
        for attribute in assigned(scope):
            if last_name(attribute.value) in watched:
                found.append((attribute.lineno, attribute.attr))
    return found


TENSOR_TYPES = {"Tensor", "nn.Parameter", "torch.Tensor"}
MODEL_TYPES: set[str] = set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_hung_on_tensors(path):
    """What is known of a tensor stands in its side record: `records.note_`."""
    found = put_on(ast.parse(path.read_text()), TENSOR_NAMES, TENSOR_TYPES)
    allowed = TENSOR_SLOTS | (OWN_KIND[1] if str(path).endswith(OWN_KIND[0]) else set())
    assert not [(line, name) for line, name in found if name not in allowed]


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if room_of(p) in ("memory", "parallel", "train", "infer")],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_nothing_is_hung_on_models(path):
    """What is known of a model stands in its record: `records.record_of`."""
    assert not put_on(ast.parse(path.read_text()), MODEL_NAMES, MODEL_TYPES)


@pytest.mark.parametrize(
    "lines",
    [
        "def f(one): one.parameter.master = home",
        "def f(parameter: nn.Parameter): parameter.master = home",
        "def f(one: Tensor): one.left_gradient = self",
        "def f(parameter):\n  target: Any = parameter\n  target.left_gradient = self",
        "for target in ps:\n  tensor = target\n  tensor.read_streamed = read",
        'def f(p): setattr(p, "master", 1)',
    ],
)
def test_what_is_hung_on_a_tensor_would_be_seen(lines):
    assert put_on(ast.parse(lines), TENSOR_NAMES, TENSOR_TYPES)
    assert not put_on(ast.parse("def f(tensor: Group): tensor.x = 1"), TENSOR_NAMES, TENSOR_TYPES)


@pytest.mark.parametrize(
    "lines",
    [
        "def f(model): model.mesh, model.prefetch = 1, 2",
        "def f(model):\n  target: Any = model\n  target.precision = p",
        "def f(self): self.model.arrived = ()",
        'def f(self): setattr(self._root if x else model, "mesh", 1) or setattr(model, "mesh", 1)',
    ],
)
def test_what_is_hung_on_a_model_would_be_seen(lines):
    assert put_on(ast.parse(lines), MODEL_NAMES, MODEL_TYPES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_names_are_listed_and_documented(path):
    tree = ast.parse(path.read_text())
    if path.name == "__main__.py" or len(tree.body) == 1:  # only a docstring
        return
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    assert listed, "no __all__"
    definitions = {
        n.name: n
        for n in tree.body
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    for name in listed[0]:
        if name in definitions:
            assert ast.get_docstring(definitions[name]), f"{name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_unpickles_what_can_run_code(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called == "torch.load":
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True"
            # The worker pool talks to its own children over a pipe, never to a file.
            if room_of(path) != "testing":
                assert called not in ("pickle.load", "pickle.loads"), f"line {node.lineno}"


# Who may name an axis of the mesh; others ask `Layout` and the named sets of `parallel/layout.py`.
KNOWS_AXES = {"parallel", "memory", "testing", "compat"}
AXES = {"tp", "pp", "cp", "ep", "dp_shard", "dp_replicate"}


def axis_names(tree):
    """Lines on which a string or a field is the name of an axis."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in AXES:
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in AXES:
            yield node.lineno


def test_axis_names_are_found():
    lines = sorted(axis_names(ast.parse("a = mesh['tp']\nb = layout.pp\nc = 'tp is long'\n")))
    assert lines == [1, 2]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_axes_are_named_in_few_rooms(path):
    if room_of(path) not in KNOWS_AXES:
        assert not list(axis_names(ast.parse(path.read_text())))


# Whoever may ask for a family's class: its room, the tests of families, old programs' names.
KNOWS_FAMILIES = {"models", "testing", "compat"}


@cache
def family_classes():
    """Names of the classes and configs in `models` that a model or its config can be of."""
    found, bases = set(), {"Model", "ModelConfig"}
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "models").rglob("*.py")]
    classes = [n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)]
    while bases - found:
        found |= bases
        bases = {c.name for c in classes if {getattr(b, "id", "") for b in c.bases} & found}
    return found - {"Model", "ModelConfig"}


def test_family_classes_are_found():
    assert {"GPT2", "CausalLM", "Seq2Seq", "CPMBee", "BertConfig", "Qwen2Moe"} <= family_classes()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_families_answer_by_traits(path):
    """Outside of `models` nobody asks which family a model is, only for its traits."""
    if room_of(path) in KNOWS_FAMILIES:
        return
    names = family_classes()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            assert not asked & names, f"line {node.lineno} asks for {asked & names}"
