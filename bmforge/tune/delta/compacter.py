"""Compacter: bottleneck adapters whose matrices are sums of Kronecker products."""

from __future__ import annotations

from types import MappingProxyType

from bmforge.tune.delta.adapter import Adapter

__all__ = ["Compacter"]


class Compacter(Adapter):
    """Bottleneck adapter whose matrices are sums of Kronecker products.

    It computes ``h + up(act(down(h)))``, where ``down`` and ``up`` multiply with matrices of the
    form ``sum over n of kron(rule[n], left[n] right[n])``.

    The options are those of `Adapter`, and `rank` (0 to keep the right Kronecker factors
    unfactorized) and `shared_rule` (both matrices of an adapter share the left Kronecker factors).

    Source: Karimi Mahabadi et al., "Compacter" (2021).
    """

    defaults = MappingProxyType({"form": "kronecker", "reduction": 16, "division": 4, "rank": 1})
    peft_type = "BMFORGE_COMPACTER"
