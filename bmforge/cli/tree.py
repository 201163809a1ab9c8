"""`bmforge tree`: shows a model's modules, with equal layers folded and trained ones marked."""

from __future__ import annotations

from rich.console import Console

from bmforge.cli.open_model import put_deltas_, with_own_adapter
from bmforge.cli.tree_options import TreeCommand
from bmforge.errors import ConfigError
from bmforge.files import check_place, find_export
from bmforge.models.adapter_dirs import is_adapter
from bmforge.models.hub import find_config
from bmforge.recipes.adapter_dirs import find_source
from bmforge.tune.delta.tree import draw_tree, fold_tree
from bmforge.tune.delta.tree_page import write_tree_page

__all__ = ["run_tree"]


def run_tree(command: TreeCommand) -> None:
    """Print a model's module tree, or write it as an HTML page."""
    if command.html is not None:
        if command.html.suffix != ".html":
            raise ConfigError(f"html={str(command.html)!r} must end in .html.")
        check_place(command.html, "html", is_file=True)
    name, adapters = str(find_export(command.model)), command.adapter
    if is_adapter(name):
        source = find_source(name)
        name, adapters = str(source.model), with_own_adapter(source, adapters)
    family, config = find_config(name)
    model = family.from_config(config, device="meta")
    # The tree shows no weights, so the base model's weights need not be those used in training.
    put_deltas_(model, adapters, trainable=True, allow_other_base=True)
    row = fold_tree(model, family.__name__, command.keep_empty)
    if command.html is None:
        Console().print(draw_tree(row))
        return
    write_tree_page(command.html, row, command.model)
    print(f"wrote {command.html}")
