"""LoRA adapters: the rank lasso, and the ranks that are left."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fednmap.models.lora import factors, ranks
from fednmap.names import InputError
from fednmap.problems import Network
from fednmap.regularizers import rank_components


class Adapter(nn.Module):
    """As peft lays them out: lora_A and lora_B hold a linear layer by the adapter's name."""

    def __init__(self, inputs=5, outputs=4, rank=3):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})

    def forward(self, x):
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_the_rank_lasso_shrinks_a_row_of_a_with_its_column_of_b():
    torch.manual_seed(0)
    module = nn.Sequential(Adapter(), nn.Tanh(), Adapter(4, 6, 2), nn.Linear(6, 2))
    problem = Network(module, cross_entropy, [(torch.randn(6, 5), torch.arange(6) % 2)])
    phi, x = rank_components(0.7, module), torch.randn(problem.dim)
    expected, norms = problem.parameters(x.clone()), []
    for k in (0, 2):
        a, b = (expected[f"{k}.lora_{f}.default.weight"] for f in "AB")
        for j in range(len(a)):
            norm = torch.cat([a[j], b[:, j]]).norm()
            norms.append(float(norm))
            for part in (a[j], b[:, j]):
                part *= max(0.0, 1 - 0.5 * 0.7 / float(norm))
    torch.testing.assert_close(phi.prox(x, 0.5), problem.flat(expected))
    assert float(phi.value(x)) == pytest.approx(0.7 * sum(norms), rel=1e-6)
    with pytest.raises(InputError, match="expected a module with trained lora_A"):
        rank_components(0.7, nn.Linear(2, 2))
    shrunk = problem.module(phi.prox(x, 1.001 * sorted(norms)[1] / 0.7))
    assert sum(ranks(shrunk).values()) == 3  # of five, without the two shortest
    assert list(factors(shrunk)) == ["0", "2"]


def test_a_module_without_adapters_is_refused():
    with pytest.raises(InputError, match="expected a module with LoRA adapters"):
        ranks(nn.Linear(2, 2))
