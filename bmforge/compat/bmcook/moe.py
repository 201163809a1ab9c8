"""First step of BMCook's MoEfication: recording MLP inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from bmforge.compat.bmcook.addresses import old_name
from bmforge.errors import ConfigError

__all__ = ["BMMoE"]

Forward = Callable[..., Any]


class BMMoE:
    """Records MLP activations, from which `bmforge.compress.moefy` builds experts."""

    @staticmethod
    def get_hidden(model: nn.Module, config: Any, forward_fn: Forward) -> Forward:
        """Return a forward function whose output includes the recorded tensors, `moe_records`.

        Args:
            model: any model.
            config: a `ConfigParser`, whose `first_FFN_module` lists substrings of module names.
            forward_fn: ``(model, loss_func, targets, *args, **kwargs)`` -> output.

        Raises:
            ConfigError: an entry matches no module name.
        """
        section = config.get("MoEfication")
        if not section["is_moefy"]:
            return forward_fn
        records: dict[str, Tensor] = {}
        for name, label in _find(model, section["first_FFN_module"]).items():
            hook = partial(_record, records, label)
            model.get_submodule(name).register_forward_hook(hook)
        return partial(_forward, records, forward_fn)


def _forward(records: dict[str, Tensor], forward_fn: Forward, *args: Any, **kwargs: Any) -> Any:
    records.clear()
    out = forward_fn(*args, **kwargs)
    out.moe_records = dict(records)
    records.clear()
    return out


def _record(records: dict[str, Tensor], label: str, module: nn.Module, args: Any, out: Any) -> None:
    records[label] = (out[0] if isinstance(out, tuple) else out).detach()


def _find(model: nn.Module, patterns: list[str]) -> dict[str, str]:
    """Return a dict from bmforge name to ModelCenter name of the modules that match a pattern."""
    old_names = {}
    for name, module in model.named_modules():
        if name and not list(module.children()):
            inner = f"{name.removeprefix('model.')}.weight"
            old_names[name] = old_name(inner, has_gate=False).removesuffix(".weight")
    matched = {}
    for pattern in patterns:
        hits = {n: old for n, old in old_names.items() if pattern in old or pattern in n}
        if not hits:
            raise ConfigError(
                f"MoEfication.first_FFN_module: {pattern!r} matches no module name, such "
                f"as {next(iter(old_names.values()))!r}."
            )
        matched.update(hits)
    return matched
