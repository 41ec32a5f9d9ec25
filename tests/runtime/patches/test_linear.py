"""The bytes of factors, and which layers have none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hvd_autosync.runtime.patches.factor_meter import FactorMeter
from hvd_autosync.runtime.patches.linear import LinearPass, is_product, product, watch_linear

ROWS = 6
TELLS_OF_GRAPHS = hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def measured(
    model: Net, loss: Callable[[Net], torch.Tensor] = lambda m: m(torch.randn(ROWS, 8)).sum()
) -> dict[str, int]:
    meter = FactorMeter(model.parameters())
    for _ in range(2):
        loss(model).backward()  # gradients add up; each pass is looked at alone
    names = {parameter: name for name, parameter in model.named_parameters()}
    meter.step_ends()
    loss(model).backward()  # belongs to the next step
    meter.step_ends()
    return {names[weight]: each.whole for weight, each in meter.factors.items()}


def test_bytes_of_factors() -> None:
    expected = {"first.weight": 2 * 4 * ROWS * (8 + 16), "second.weight": 2 * 4 * ROWS * (16 + 4)}
    assert measured(Net()) == expected


def test_factors_behind_a_relu_have_shorter_codes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    meter = FactorMeter(model.parameters())
    model(torch.randn(512, 64)).pow(2).sum().backward()
    meter.step_ends()
    shares = [meter.factors[model[layer].weight].coded_share for layer in (0, 2)]
    # Of both layers one of two factors is half zeros; upper bytes repeat in both.
    assert all(0.55 < share < 0.75 for share in shares)


def test_under_autocast_factors_have_half_the_bytes() -> None:
    def loss(model: Net) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(ROWS, 8)).float().sum()

    expected = {"first.weight": 2 * 2 * ROWS * (8 + 16), "second.weight": 2 * 2 * ROWS * (16 + 4)}
    assert measured(Net(), loss) == expected


def test_a_layer_that_is_used_twice_counts_twice() -> None:
    x = torch.randn(ROWS, 8)
    found = measured(Net(), lambda m: m(x).sum() + F.linear(x, m.first.weight).sum())
    assert found["first.weight"] == 2 * 2 * 4 * ROWS * (8 + 16)


def test_gradients_that_are_no_products() -> None:
    x = torch.randn(ROWS, 8)
    penalized = measured(Net(), lambda m: m(x).sum() + m.first.weight.pow(2).sum())
    assert set(penalized) == {"second.weight"}
    hooked = Net()
    hooked.second.weight.register_hook(lambda gradient: gradient * 0.5)
    assert set(measured(hooked)) == {"first.weight"}
    unused = measured(Net(), lambda m: m.second(torch.randn(ROWS, 16)).sum())
    assert set(unused) == {"second.weight"}


def test_an_exchange_keeps_its_passes_while_they_are_measured() -> None:
    model = Net()
    used = watch_linear([model.first.weight])[model.first.weight]
    found = measured(model)
    assert set(found) == {"first.weight", "second.weight"}
    assert len(used.passes) == 3  # of all backward passes, until the exchange has sent them


def test_an_exchange_keeps_no_more_once_they_were_measured() -> None:
    model = Net()
    used = watch_linear([model.first.weight], lambda *_: False)[model.first.weight]
    assert "first.weight" in measured(model)
    used.clear()
    model(torch.randn(ROWS, 8)).sum().backward()
    assert [each.inputs.untyped_storage().nbytes() for each in used.passes] == [4]


def test_a_gradient_that_overflows_is_no_evidence() -> None:
    model, x = Net(), torch.randn(ROWS, 8)
    meter = FactorMeter(model.parameters())
    (model(x).sum() * torch.inf).backward()
    meter.step_ends()
    model(x).sum().backward()
    meter.step_ends()
    assert len(meter.factors) == 2


def test_gradients_of_inputs_alone_are_no_passes() -> None:
    """As in adversarial training, and of a discriminator that is frozen while another trains."""
    x = torch.randn(ROWS, 8, requires_grad=True)

    def loss(model: Net) -> torch.Tensor:
        torch.autograd.grad(model(x).sum(), x)
        model.requires_grad_(False)
        model(x).sum().backward()
        model.requires_grad_(True)
        return model(x).sum()

    assert measured(Net(), loss) == measured(Net(), lambda m: m(x).sum())


def test_a_frozen_layer_has_no_passes_until_it_is_trained() -> None:
    model = Net()
    model.first.requires_grad_(False)
    held = watch_linear([model.first.weight, model.second.weight])

    def rows() -> list[list[int]]:
        model(torch.randn(ROWS, 8)).sum().backward()
        return [[each.rows for each in layer.passes] for layer in held.values()]

    assert rows() == [[], [ROWS]]
    model.first.requires_grad_(True)
    assert rows() == [[ROWS], [ROWS, ROWS]]
    assert rows() == [[ROWS, ROWS], [ROWS] * 3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_no_passes(reentrant: bool) -> None:
    model = Net()
    held = watch_linear(model.parameters())
    x = torch.randn(ROWS, 8, requires_grad=True)
    hidden = checkpoint(model.first, x, use_reentrant=reentrant)
    model.second(hidden).sum().backward()
    assert held[model.first.weight].passes == []
    assert len(held[model.second.weight].passes) == 1


@pytest.mark.skipif(not TELLS_OF_GRAPHS, reason="this torch does not tell which graphs it keeps")
@pytest.mark.parametrize("retained", [False, True])
def test_inputs_are_let_go_though_the_loss_is_kept(retained: bool) -> None:
    """Unless the graph may be passed again, whose factors are the same then."""
    model = Net()
    held = watch_linear(model.parameters())
    x = torch.randn(ROWS, 8)
    memory = weakref.ref(x.untyped_storage())
    loss = model(x).sum()
    loss.backward(retain_graph=retained)
    (first,) = held[model.first.weight].passes
    assert torch.equal(first.inputs, x)
    for layer in held.values():
        layer.clear()
    if retained:
        loss.backward()
        (again,) = held[model.first.weight].passes
        assert torch.equal(again.inputs, x)
        for layer in held.values():
            layer.clear()
        del again
    del x, first
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_outputs_alone_leave_the_pass_that_follows(
    *, bias: bool, dimensions: int
) -> None:
    """As where the losses of several tasks are weighted by their gradients of shared features."""
    layer = nn.Linear(8, 16, bias=bias)
    held = watch_linear([layer.weight])
    x = torch.randn(ROWS, 8) if dimensions == 2 else torch.randn(2, ROWS // 2, 8)
    features = layer(x)
    losses = [features.pow(power).mean() for power in (2, 4)]
    found = [torch.autograd.grad(loss, features)[0] for loss in losses]
    assert held[layer.weight].passes == []
    features.backward(found[0] + 2 * found[1])
    (only,) = passes = held[layer.weight].passes
    assert torch.equal(only.inputs, x.reshape(ROWS, 8))
    made = product(passes, torch.float32, bias=False)
    assert layer.weight.grad is not None
    assert is_product(made, layer.weight.grad, passes, bias=False)


def test_factors_of_outputs_whose_gradients_the_script_changes() -> None:
    def loss(model: Net) -> torch.Tensor:
        outputs: torch.Tensor = model(torch.randn(ROWS, 8))
        outputs.register_hook(lambda gradients: 2 * gradients)
        return outputs.sum()

    assert measured(Net(), loss) == measured(Net())


def factors(kind: torch.dtype, rows: int = 32) -> LinearPass:
    return LinearPass(torch.randn(rows, 30).to(kind), torch.randn(rows, 20).to(kind))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_changed_element_is_no_product(kind: torch.dtype) -> None:
    own = factors(kind)
    own.inputs[:, 5] *= 1e-8  # so its gradients are far below the largest
    made = product([own], torch.float32, bias=False)
    assert is_product(made, made.clone(), [own], bias=False)
    for row, column, change in ((3, 7, 0.0), (4, 5, 0.0), (4, 7, 1.1)):
        changed = made.clone()
        changed[row, column] *= change
        assert not is_product(made, changed, [own], bias=False)
    assert not is_product(made, made * 0.99, [own], bias=False)
    mask = torch.ones_like(made)
    mask[:, 5] = 0
    assert not is_product(made, made * mask, [own], bias=False)


def test_another_order_of_addition_is_allowed() -> None:
    for rows in (2, 64, 1024):
        own = factors(torch.float32, rows)
        made = product([own], torch.float32, bias=False)
        backwards = LinearPass(own.inputs.flip(0), own.output_gradients.flip(0))
        assert is_product(made, product([backwards], torch.float32, bias=False), [own], bias=False)


def test_a_rounding_to_a_neighbour_is_allowed_where_it_is_rare() -> None:
    own = factors(torch.bfloat16)
    made = product([own], torch.float32, bias=False)
    rarely = made.clone()
    rarely[0, 0] *= 1 + torch.finfo(torch.bfloat16).eps
    assert is_product(made, rarely, [own], bias=False)
    # Of several uses in one backward pass, autograd rounds the sum too.
    assert not is_product(2 * made, 2 * rarely, [own, own], bias=False)


def test_a_gradient_that_is_not_finite_or_of_another_shape_is_no_product() -> None:
    own = factors(torch.float32)
    made = product([own], torch.float32, bias=True)
    for bad in (torch.inf, torch.nan):
        gradient = made.clone()
        gradient[0] = bad
        assert not is_product(made, gradient, [own], bias=True)
    assert not is_product(made, made[None], [own], bias=True)


SCRIPTS: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "gradients of samples": lambda m, x: torch.func.vmap(
        torch.func.grad(lambda each: m(each).sum())
    )(x).sum(),
    "jacobian": lambda m, x: torch.func.jacrev(m)(x[0]).sum(),
    "hessian": lambda m, x: torch.func.hessian(lambda each: m(each).pow(2).sum())(x[0]).sum(),
    "batched gradients": lambda m, x: torch.autograd.functional.jacobian(
        m, x[:2], vectorize=True, create_graph=True
    ).sum(),
    "sparse inputs": lambda m, x: m(x.relu().to_sparse()).sum(),
    "no inputs": lambda m, x: nn.Linear(0, 16)(x[:, :0]).sum() + m(x).sum(),
    "no rows": lambda m, x: m(x[:0]).sum() + m(x).sum(),
    "traced": lambda m, x: torch.jit.trace(m, x)(x).sum(),
    "scripted": lambda m, x: torch.jit.script(m)(x).sum(),
    "compiled": lambda m, x: torch.compile(m, backend="aot_eager", fullgraph=True)(x).sum(),
    "checkpointed": lambda m, x: checkpoint(m, x, use_reentrant=False).sum(),
    "expanded": lambda m, x: m(x[:1].expand(ROWS, 8)).sum(),
    "created graph": lambda m, x: (
        torch.autograd.grad(m(x.requires_grad_()).sum(), x, create_graph=True)[0].pow(2).sum()
    ),
}


def test_passes_that_cannot_pay_take_no_memory() -> None:
    model = Net()
    held = watch_linear(model.parameters(), lambda rows, weight, item: rows * item < 4 * ROWS)
    model(torch.randn(ROWS, 8)).sum().backward()
    model(torch.randn(ROWS - 1, 8)).sum().backward()
    for layer in held.values():
        large, small = layer.passes
        assert (large.rows, small.rows) == (ROWS, ROWS - 1)
        for each in (large.inputs, large.output_gradients):
            assert each.untyped_storage().nbytes() == 4
        assert small.inputs.abs().sum() > 0


def test_gradients_of_inputs_alone_leave_nothing() -> None:
    """As of loops that look for adversarial inputs."""
    model, x = Net(), torch.randn(ROWS, 8, requires_grad=True)
    held = watch_linear(model.parameters())
    for _ in range(5):
        torch.autograd.grad(model(x).sum(), x)
    assert [len(layer._arrived) for layer in held.values()] == [1, 1]
    model(x).sum().backward()
    assert [len(layer.passes) for layer in held.values()] == [1, 1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_do_the_same_while_they_are_watched(name: str) -> None:
    def gradients(*, watched: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        model, x = Net(), torch.randn(ROWS, 8)
        held = watch_linear(model.parameters()) if watched else {}
        SCRIPTS[name](model, x).backward()
        assert len(held) == 2 * watched
        return [p.grad for p in model.parameters()]

    for ours, expected in zip(gradients(watched=True), gradients(watched=False), strict=True):
        assert (ours is None) == (expected is None)
        # torch.jit compiles what it has profiled, and adds in another order then.
        if ours is not None and expected is not None:
            torch.testing.assert_close(ours, expected)


def test_the_function_is_pytorchs_own_again_when_nothing_is_watched() -> None:
    gc.collect()
    own = F.linear
    held = watch_linear(Net().parameters())
    watched = F.linear
    assert watched is not own
    assert {own: 1}[watched] == 1

    class Doubling(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            return result * 2 if func is F.linear else result

    x, weight = torch.ones(1, 2), torch.ones(1, 2)
    assert F.linear(x.as_subclass(Doubling), weight).item() == 4.0
    del held
    gc.collect()
    assert F.linear is own
    assert F.linear(x.as_subclass(Doubling), weight).item() == 4.0


def test_dropped_layers_keep_no_passes() -> None:
    model = Net()
    held = watch_linear(model.parameters())
    model(torch.randn(ROWS, 8)).sum().backward()
    layer = weakref.ref(held[model.first.weight])
    assert layer().passes  # type: ignore[union-attr]
    del held
    gc.collect()
    assert layer() is None
    model(torch.randn(ROWS, 8)).sum().backward()
    assert watch_linear([model.first.weight])[model.first.weight].passes == []
