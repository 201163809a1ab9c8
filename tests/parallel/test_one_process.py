"""Half precision on one process: autograd's own gradients, without a pass that copies them."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmforge.parallel import parallelize
from bmforge.shards import local_tensor


class Copies(TorchDispatchMode):
    """Counts the elements that are copied from fp32 to fp32."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_copy = func is torch.ops.aten.copy_.default and args[0] is not args[1]
        if is_copy and args[0].dtype == args[1].dtype == torch.float32:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def by_hand(model, batches):
    """Gradients of a bf16 copy, summed in fp32."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in batches:
        half = copy.deepcopy(model).bfloat16()
        half(x.bfloat16()).float().square().sum().backward()
        for name, parameter in half.named_parameters():
            sums[name] += parameter.grad.float()
    return sums


def test_gradients_are_those_of_autograd_and_are_not_copied():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    batches = torch.randn(4, 5, 8)
    first, both = by_hand(model, batches[:2]), by_hand(model, batches[2:])
    parallelize(model, precision="bf16")
    seen = Copies()
    for x in batches[:2]:
        out = model(x)
        with seen:
            out.float().square().sum().backward()
    assert seen.elements == 0
    kept = {name: local_tensor(p.grad) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for x in batches[2:]:
        model(x).float().square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(kept[name], first[name], rtol=0, atol=0)
        torch.testing.assert_close(local_tensor(parameter.grad), both[name], rtol=0, atol=0)
