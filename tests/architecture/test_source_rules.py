"""Rules for every source file; each test lists all its offenders."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from source import (
    FILES,
    PACKAGE,
    assigned_attributes,
    functions,
    last_name,
    short_name,
    subpackage_of,
    tree_of,
)

FILE_LIMIT, FUNCTION_LIMIT, PARAMETER_LIMIT = 400, 60, 10
DEVICE_WORDS = re.compile(r"\b(cuda|nccl|mps|xpu|hpu|npu|rocm)\b")


def long_parts(path) -> list[str]:
    """Return the file, functions and constructors of a source file that exceed the limits."""
    problems = []
    lines = path.read_text("utf-8").count("\n")
    if lines > FILE_LIMIT:
        problems.append(f"{short_name(path)} has {lines} lines")
    for node in functions(tree_of(path)):
        docstring = ast.get_docstring(node, clean=False)
        length = node.end_lineno - node.lineno + 1
        length -= docstring.count("\n") + 1 if docstring else 0
        if length > FUNCTION_LIMIT:
            problems.append(f"{short_name(path)}: {node.name} has {length} lines")
        count = len(node.args.args + node.args.kwonlyargs) - 1
        if node.name == "__init__" and count > PARAMETER_LIMIT:
            problems.append(f"{short_name(path)}:{node.lineno}: constructor of {count} parameters")
    return problems


def test_files_functions_and_constructors_are_small() -> None:
    problems = [problem for path in FILES for problem in long_parts(path)]
    assert not problems, "\n".join(problems)


def test_devices_are_named_in_one_file() -> None:
    lines = []
    for path in FILES:
        if path.name == "device.py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                sentence = "\n" in node.value or " " in node.value
                if not sentence and DEVICE_WORDS.search(node.value):
                    lines.append(f"{short_name(path)}:{node.lineno}")
            if isinstance(node, ast.Attribute) and DEVICE_WORDS.fullmatch(node.attr):
                lines.append(f"{short_name(path)}:{node.lineno}")
    assert not lines, lines


def forward_patches(tree: ast.AST) -> list[int]:
    """Return the lines that replace a module's forward."""
    lines = [node.lineno for node in assigned_attributes(tree) if node.attr == "forward"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            key = node.slice
            if isinstance(key, ast.Constant) and key.value == "forward":
                lines.append(node.lineno)
    return lines


def test_forwards_are_replaced_in_one_file() -> None:
    lines = {short_name(p): forward_patches(tree_of(p)) for p in FILES if p.name != "surgery.py"}
    assert not any(lines.values()), {name: at for name, at in lines.items() if at}


@pytest.mark.parametrize(
    "line",
    [
        "block.forward = partial(checkpoint, block.forward)",
        "a.b.forward, x = f, 1",
        'setattr(module, "forward", f)',
        'module.__dict__["forward"] = f',
    ],
)
def test_a_replaced_forward_is_found(line: str) -> None:
    assert forward_patches(ast.parse(line))
    assert not forward_patches(ast.parse("y = module.forward(x)"))


def torch_patches(tree: ast.AST) -> list[int]:
    """Return the lines that assign attributes of torch or of its modules and classes."""
    return [
        node.lineno
        for node in assigned_attributes(tree)
        if ast.unparse(node.value).split(".")[0] == "torch"
        and not ast.unparse(node).startswith("torch.backends.")  # torch's documented settings
    ]


def test_nothing_patches_torch() -> None:
    lines = {short_name(p): torch_patches(tree_of(p)) for p in FILES}
    assert not any(lines.values()), {name: at for name, at in lines.items() if at}


def test_a_patch_of_torch_is_found() -> None:
    assert torch_patches(ast.parse("torch.UntypedStorage.resize_ = f"))
    assert torch_patches(ast.parse('setattr(torch.Tensor, "__deepcopy__", f)'))
    assert not torch_patches(ast.parse("torch.backends.mkldnn.deterministic = True"))


TENSOR_NAMES = {"parameter", "param", "p", "tensor", "weight", "bias", "buffer"}
TENSOR_TYPES = {"Tensor", "nn.Parameter", "torch.Tensor"}
MODEL_NAMES = {"model", "root"}
# Attributes that torch itself lets everybody set.
TENSOR_SLOTS = {"data", "grad", "requires_grad"}
# BMTrain's DistributedParameter has these attributes; old programs read them.
BMTRAIN_FILES = ("compat/bmtrain/parameter.py", "compat/bmtrain/param_init.py")
BMTRAIN_ATTRIBUTES = {
    *(
        "origin",
        "is_empty",
        "is_summed",
        "group",
        "gather",
        "gather_all",
        "tp_gather",
        "__deepcopy__",
    ),
}


def set_from_outside(tree: ast.AST, names: set[str], types: set[str]) -> list[tuple[int, str]]:
    """Return (line, attribute) of assignments to attributes of variables with these names.

    Aliases (`target = parameter`) and arguments of these types count too; arguments with one of
    the names and an annotation of another type do not.
    """
    hits: list[tuple[int, str]] = []
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
        for attribute in assigned_attributes(scope):
            if last_name(attribute.value) in watched:
                hits.append((attribute.lineno, attribute.attr))
    return hits


def test_nothing_is_set_on_tensors_from_outside() -> None:
    """Facts about a tensor are in its record (`bmforge.records`), not in its attributes."""
    problems = []
    for path in FILES:
        allowed = set(TENSOR_SLOTS)
        if short_name(path) in BMTRAIN_FILES:
            allowed |= BMTRAIN_ATTRIBUTES
        for line, name in set_from_outside(tree_of(path), TENSOR_NAMES, TENSOR_TYPES):
            if name not in allowed:
                problems.append(f"{short_name(path)}:{line}: {name}")
    assert not problems, "\n".join(problems)


def test_nothing_is_set_on_models_from_outside() -> None:
    """Facts about a model are in its record; per-call choices are arguments of the call."""
    problems = [
        f"{short_name(path)}:{line}: {name}"
        for path in FILES
        if subpackage_of(path) in ("memory", "parallel", "train", "infer")
        for line, name in set_from_outside(tree_of(path), MODEL_NAMES, set())
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "lines",
    [
        "def f(one): one.parameter.master = home",
        "def f(parameter: nn.Parameter): parameter.master = home",
        "def f(one: Tensor): one.offloaded_gradient = self",
        "def f(parameter):\n  target: Any = parameter\n  target.offloaded_gradient = self",
        "for target in ps:\n  tensor = target\n  tensor.read_streamed = read",
        'def f(p): setattr(p, "master", 1)',
    ],
)
def test_an_attribute_set_on_a_tensor_is_found(lines: str) -> None:
    assert set_from_outside(ast.parse(lines), TENSOR_NAMES, TENSOR_TYPES)
    other = ast.parse("def f(tensor: Group): tensor.x = 1")
    assert not set_from_outside(other, TENSOR_NAMES, TENSOR_TYPES)


@pytest.mark.parametrize(
    "lines",
    [
        "def f(model): model.mesh, model.prefetch = 1, 2",
        "def f(model):\n  target: Any = model\n  target.precision = p",
        "def f(self): self.model.stage_inputs = ()",
        'def f(self): setattr(self._root if x else model, "mesh", 1) or setattr(model, "mesh", 1)',
    ],
)
def test_an_attribute_set_on_a_model_is_found(lines: str) -> None:
    assert set_from_outside(ast.parse(lines), MODEL_NAMES, set())


def test_public_names_are_listed_and_documented() -> None:
    problems = []
    for path in FILES:
        tree = tree_of(path)
        if path.name == "__main__.py" or len(tree.body) == 1:  # only a docstring
            continue
        listed = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ]
        if not listed:
            problems.append(f"{short_name(path)} has no __all__")
            continue
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, kinds) and node.name in listed[0] and not ast.get_docstring(node):
                problems.append(f"{short_name(path)}: {node.name} has no docstring")
    assert not problems, "\n".join(problems)


def test_nothing_unpickles_what_can_run_code() -> None:
    lines = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            unsafe_load = called == "torch.load" and keywords.get("weights_only") != "True"
            # The worker pool of `testing` unpickles only what its own children send by a pipe.
            pickled = called in ("pickle.load", "pickle.loads") and subpackage_of(path) != "testing"
            if unsafe_load or pickled:
                lines.append(f"{short_name(path)}:{node.lineno}")
    assert not lines, lines


# Subpackages that may name a mesh axis; others use `Layout` and the sets in `parallel/layout.py`.
KNOWS_AXES = {"parallel", "memory", "testing", "compat"}
AXES = {"tp", "pp", "cp", "ep", "dp_shard", "dp_replicate"}


def axis_lines(tree: ast.AST) -> list[int]:
    """Return the lines on which a string or an attribute is the name of a mesh axis."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in AXES)
        or (isinstance(node, ast.Attribute) and node.attr in AXES)
    ]


def test_axis_names_are_found() -> None:
    lines = axis_lines(ast.parse("a = mesh['tp']\nb = layout.pp\nc = 'tp is long'\n"))
    assert sorted(lines) == [1, 2]


def test_mesh_axes_are_named_in_few_subpackages() -> None:
    lines = {
        short_name(p): axis_lines(tree_of(p)) for p in FILES if subpackage_of(p) not in KNOWS_AXES
    }
    assert not any(lines.values()), {name: at for name, at in lines.items() if at}


# Subpackages that may test for a family's class; others use the family's traits.
KNOWS_FAMILIES = {"models", "testing", "compat"}


@cache
def family_classes() -> set[str]:
    """Return the names of all subclasses of `Model` and `ModelConfig` in `models`."""
    names: set[str] = set()
    bases = {"Model", "ModelConfig"}
    trees = [tree_of(path) for path in FILES if subpackage_of(path) == "models"]
    classes = [n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)]
    while bases - names:
        names |= bases
        bases = {c.name for c in classes if {getattr(b, "id", "") for b in c.bases} & names}
    return names - {"Model", "ModelConfig"}


def test_family_classes_are_found() -> None:
    assert {"GPT2", "CausalLM", "Seq2Seq", "CPMBee", "BertConfig", "Qwen2Moe"} <= family_classes()


def test_families_are_told_apart_by_traits() -> None:
    lines = []
    for path in FILES:
        if subpackage_of(path) in KNOWS_FAMILIES:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "issubclass"):
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                if names & family_classes():
                    lines.append(f"{short_name(path)}:{node.lineno}")
    assert not lines, lines


def test_typed_marker_is_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
