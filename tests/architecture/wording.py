"""Finds wording that readers of the package stumble over: see "Words" in CONTRIBUTING.md.

Each rule yields places as "file:line: text". The rules are heuristics; the limits in
`test_wording.py` leave room for the few places where a reader would object to the rewrite.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from source import FILES, ROOT, short_name, subpackage_of, tree_of

# Variable and parameter names that do not say what the value is.
EMPTY_NAMES = {
    *("found", "one", "given", "told", "kept", "held", "mine", "made", "known", "here", "there"),
    *("whole", "said", "asked", "wanted", "rest", "place", "ours", "theirs"),
}
# "Return what ...", "Tell whether it ...": the first line of a docstring must name its object.
PRONOUN_OBJECT = re.compile(
    r"(?:Return|Yield|Tell|Keep|Say|Have|Give|Take|Hold|Bring|Let|Put) "
    r"(?:what|who|whether|which|that|where|how much|it|them|these|those)\b",
    re.I,
)
# "What a layout may ...": a module docstring must be a sentence or a noun phrase.
BARE_CLAUSE = re.compile(r"(?:What|Who|Which|Where|From|How|When|Whether|Giving|Having)\b")
# "seed: of the drawing": the text of an argument must be a noun phrase.
FRAGMENT = re.compile(
    r"\s+\**[a-z_]\w*: (?:of|by|for|to|in|as|with|what|who|where|beside|behind)\b"
)
HOUSE_WORDS = re.compile(
    r"\b(?:beside|stands? (?:in|beside|behind|for)|(?:is|are) told|tells? (?:of|what)|drawn|"
    r"likeliest|laid out|lay out|made of|of (?:one's|its|their) own|nobody|"
    r"comes? and goe?s?|(?:is|are) to be|taken and left|"
    r"as (?:it|they) (?:is|are|was|were)(?! \w+(?:ed|en|de)\b)|"
    r"no word|without a word)\b"
)
PICTURES = re.compile(r"\b(?:house|rooms?|ground floor|funnel|teacher beside|zeros and integers)\b")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[tuple[Path, ast.AST, str]]:
    """Yield (file, node, docstring) for every docstring of the package."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
                yield path, node, text


def at(path: Path, node: ast.AST, text: str) -> str:
    return f"{short_name(path)}:{getattr(node, 'lineno', 1)}: {text[:80]}"


def pronoun_objects() -> Iterator[str]:
    """Yield docstrings whose first line has a pronoun as its object."""
    for path, node, text in docstrings():
        if not isinstance(node, ast.Module) and PRONOUN_OBJECT.match(text):
            yield at(path, node, text.splitlines()[0])


def bare_module_clauses() -> Iterator[str]:
    """Yield module docstrings that begin with a subordinate clause."""
    for path, node, text in docstrings():
        if isinstance(node, ast.Module) and BARE_CLAUSE.match(text):
            yield at(path, node, text.splitlines()[0])


def argument_fragments() -> Iterator[str]:
    """Yield argument descriptions that begin with a preposition or a pronoun."""
    for path, node, text in docstrings():
        yield from (
            at(path, node, line.strip()) for line in text.splitlines() if FRAGMENT.match(line)
        )


def house_words() -> Iterator[str]:
    """Yield docstrings with words that stand in for the field's terms."""
    for path, node, text in docstrings():
        if match := HOUSE_WORDS.search(text):
            yield at(path, node, f"{match[0]}: {text.splitlines()[0]}")


def empty_names() -> Iterator[str]:
    """Yield variables and parameters whose name does not describe the value."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if stored and node.id in EMPTY_NAMES:
                yield at(path, node, node.id)
            if isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
                yield at(path, node, node.arg)


def error_names() -> set[str]:
    """Return the names of the package's error classes."""
    tree = tree_of(next(path for path in FILES if short_name(path) == "errors.py"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def message_of(node: ast.expr) -> str:
    """Return a message with values as ``{}``; "" for a message that is no literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        return "".join(map(str, parts))
    return ""


def messages() -> Iterator[tuple[Path, ast.Call, str]]:
    """Yield (file, node, text) of every literal message of the package's error classes."""
    errors = error_names() - {"MissingDependencyError"}  # its arguments are not sentences
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            name = getattr(getattr(node, "func", None), "id", "")
            if not isinstance(node, ast.Call) or name not in errors or not node.args:
                continue
            if text := message_of(node.args[0]).strip():
                yield path, node, text


def unfinished_messages() -> Iterator[str]:
    """Yield error messages without a full stop; a value may follow it, such as a suggestion."""
    for path, node, text in messages():
        if not re.search(r"[.?!][)\"'`]?(?:\s*\{\})*$", text) and not text.endswith(": {}"):
            yield at(path, node, text[-60:])


def message_house_words() -> Iterator[str]:
    """Yield error messages with words that stand in for the field's terms."""
    for path, node, text in messages():
        if match := HOUSE_WORDS.search(text):
            yield at(path, node, f"{match[0]}: {text}")


def shared_class_names() -> Iterator[str]:
    """Yield public class names that two modules define (`compat` mirrors names of others)."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if subpackage_of(path) != "compat":
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules[node.name].add(short_name(path))
    for name, files in sorted(modules.items()):
        if len(files) > 1:
            yield f"{name}: {', '.join(sorted(files))}"


def page_lines() -> Iterator[tuple[str, str]]:
    """Yield (place, line) for every line of the pages outside code blocks."""
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        in_code = False
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            in_code ^= line.startswith("```")
            if not in_code:
                yield f"{page.relative_to(ROOT)}:{number}", re.sub("`[^`]*`", "", line).strip()


def page_house_words() -> Iterator[str]:
    """Yield lines of pages with words that stand in for the field's terms."""
    yield from (f"{p}: {line[:80]}" for p, line in page_lines() if HOUSE_WORDS.search(line))


def page_pictures() -> Iterator[str]:
    """Yield lines of pages that describe the package as a building."""
    yield from (f"{p}: {line[:80]}" for p, line in page_lines() if PICTURES.search(line))
