"""Recover quality lost by quantization, by training norms and biases within a memory budget.

    bmforge quickstart
    python examples/recover_quantised.py runs/quickstart/export runs/quickstart/data int4 24

The weights stay packed, and blocks that do not fit into the budget (in MiB, for the model and
steps without gradients) are streamed; the float model is the teacher.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from bmforge.data import TokenStore
from bmforge.infer import Engine, EngineConfig
from bmforge.models import AutoModel

STEPS, ROWS = 200, 8


def read_rows(folder: str, length: int) -> torch.Tensor:
    """Return tokens of a store with shape (rows, length)."""
    store = TokenStore(folder)
    ids = torch.cat([torch.from_numpy(store[i].astype("int64")) for i in range(len(store))])
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Return the mean loss per held-out token."""
    return float(torch.stack([model(input_ids=r, labels=r).loss for r in rows.split(ROWS)]).mean())


if __name__ == "__main__":
    directory, corpus, scheme, budget = sys.argv[1:5]
    teacher = AutoModel.from_pretrained(directory).eval()
    length = min(128, teacher.config.max_seq_len)
    held_out = read_rows(f"{corpus}/validation/tokens", length)[: 32 * ROWS]
    texts = read_rows(f"{corpus}/train/tokens", length)
    config = EngineConfig(max_rows=ROWS, max_tokens=length)
    budget_bytes = int(budget) << 20
    with Engine(
        directory, quantize=scheme, device_budget_bytes=budget_bytes, config=config
    ) as engine:
        print(engine.plan.line())
        model = engine.model
        trained = [p.requires_grad_() for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
        float_loss, before = loss_of(teacher, held_out), loss_of(model, held_out)
        order = torch.Generator().manual_seed(0)
        for _step in range(STEPS):
            ids = texts[torch.randint(len(texts), (ROWS,), generator=order)]
            with torch.no_grad():
                wanted = teacher(input_ids=ids).logits.log_softmax(-1)
            given = model(input_ids=ids).logits.log_softmax(-1)
            F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = loss_of(model, held_out)
    print(f"float {float_loss:.4f}, {scheme} {before:.4f}, after {STEPS} steps {after:.4f}")
    cost = before - float_loss
    share = (
        f"{(before - after) / cost:.0%} of it" if cost > 0.001 else "nothing: there is too little"
    )
    print(f"quantization cost {cost:.4f} nats per token; recovered: {share}")
