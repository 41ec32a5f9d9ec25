"""Scripts that read parameters in ways of their own train the same model in priority order."""

import contextlib
import copy
import io

import horovod.torch as hvd
import torch
from cases_deferred_updates import IN_BUCKETS, LATE, make, waits
from common import assert_identical, batch, exchange_of, mlp, raises, sgd, skip_unless_steps_wait
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hvd_autosync.errors import AutosyncError
from hvd_autosync.search_space.exchange_plan import ExchangePlan

ARRIVAL = ExchangePlan()
#: Steps after which a script begins something, and in all.
BEGINS, STEPS = 5, 9


class Script:
    """A training loop; what a subclass returns is compared, between orders, bit for bit."""

    begins = 0

    def __init__(self, chosen=ARRIVAL):
        self.model = self.build()
        if self.begins < 0:
            self.begin()
        _, self.distributed = make(chosen=chosen, model=self.model, base=self.optimizer())
        self.kept = []

    def build(self):
        return mlp()

    def optimizer(self):
        return sgd(self.model)

    def begin(self):
        pass

    def forward(self, x):
        return self.model(x)

    def step(self, x):
        self.forward(x).pow(2).mean().backward()

    def after_step(self):
        pass

    def train(self):
        for number in range(STEPS):
            if number == self.begins:
                self.begin()
            self.distributed.zero_grad()
            self.step(batch(number))
            self.distributed.step()
            self.after_step()
        self.late = waits(self.distributed) if exchange_of(self.distributed)._deferred_update else 0
        return [*(p.detach().clone() for p in self.model.parameters()), *self.kept]


class Compiled(Script):
    backend = "aot_eager"

    def begin(self):
        self.compiled = torch.compile(self.model, backend=self.backend)

    def forward(self, x):
        return getattr(self, "compiled", self.model)(x)


class CompiledBefore(Compiled):
    begins = -1


class CompiledLate(Compiled):
    begins = BEGINS


class CompiledAdam(Compiled):
    """Its compiled step would round otherwise."""

    def optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.05)

    def begin(self):
        super().begin()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.distributed, 0.8)

    def after_step(self):
        self.schedule.step()


class CompiledByEager(Compiled):
    backend = "eager"


class CompiledInPlace(CompiledLate):
    def begin(self):
        self.model.compile(backend=self.backend)


class CompiledFunction(CompiledLate):
    def begin(self):
        self.compiled = torch.compile(lambda x: self.model(x) * 2, backend=self.backend)


class CompiledClosure(CompiledLate):
    """Its compiled code has the parameters themselves."""

    def begin(self):
        weight, bias = self.model[0].weight, self.model[0].bias
        self.first = torch.compile(lambda x: x @ weight.t() + bias, backend=self.backend)

    def forward(self, x):
        return self.model[1:](self.first(x)) if hasattr(self, "first") else self.model(x)


class CompiledAfterReset(Compiled):
    begins = BEGINS

    def begin(self):
        torch._dynamo.reset()
        super().begin()


class Traced(Script):
    """Reads parameters in C++, in modules that were made after steps had begun to wait."""

    begins = BEGINS

    def begin(self):
        self.traced = torch.jit.trace(self.model, batch(0))

    def forward(self, x):
        with torch.jit.optimized_execution(False):  # which would round otherwise after some calls
            return getattr(self, "traced", self.model)(x)


class TracedBefore(Traced):
    begins = -1


class Scripted(Traced):
    def begin(self):
        self.traced = torch.jit.script(self.model)


class GraphModule(Traced):
    def begin(self):
        self.traced = torch.fx.symbolic_trace(self.model)


class Exported(Traced):
    def begin(self):
        self.traced = torch.export.export(self.model, (batch(0),)).module()


class Shared(Traced):
    """Another module with the same parameters, made later."""

    def begin(self):
        self.traced = mlp()
        for own, other in zip(self.model, self.traced, strict=True):
            if isinstance(own, nn.Linear):
                other.weight, other.bias = own.weight, own.bias


class Functional(Script):
    def begin(self):
        self.held = dict(self.model.named_parameters())

    def forward(self, x):
        return torch.func.functional_call(self.model, self.held, (x,))


class Stateless(Functional):
    """No module is called."""

    def forward(self, x):
        return network(self.held, x)


def network(held, x):
    for place in (0, 2, 4):
        x = torch.tanh(nn.functional.linear(x, held[f"{place}.weight"], held[f"{place}.bias"]))
    return x


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnOperation(Functional):
    def forward(self, x):
        return self.model[1:](OwnFunction.apply(x, self.held["0.weight"]) + self.held["0.bias"])


class DirectForward(Script):
    def forward(self, x):
        return self.model.forward(x)


class Replicas(Script):
    """Modules that are copied for each forward, as ``nn.DataParallel`` does."""

    def forward(self, x):
        return copy.copy(self.model)(x[:3]).sum() + self.model(x[3:]).sum()


class Checkpointed(Script):
    def forward(self, x):
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=False)


class CheckpointedReentrant(Script):
    def forward(self, x):
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=True)


class Normalized(Script):
    def build(self):
        model = mlp()
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[2])
        parametrizations.orthogonal(model[4])
        return model


class Averaged(Script):
    """An average of weights, from parameters that the script holds."""

    def begin(self):
        self.held = list(self.model.parameters())
        self.kept = [parameter.detach().clone() for parameter in self.held]

    def after_step(self):
        with torch.no_grad():
            torch._foreach_lerp_(self.kept, self.held, 0.1)


class AveragedData(Averaged):
    """The same, from tensors of the parameters' memory."""

    def begin(self):
        super().begin()
        self.held = [parameter.data for parameter in self.model.parameters()]


class AveragedDataLate(AveragedData):
    begins = BEGINS

    def after_step(self):
        if self.kept:
            super().after_step()


class AveragedArrays(Averaged):
    begins = BEGINS

    def begin(self):
        super().begin()
        self.arrays = [parameter.detach().numpy() for parameter in self.held]

    def after_step(self):
        if hasattr(self, "arrays"):
            self.kept = [torch.from_numpy(array.copy()) for array in self.arrays]


class Flattened(AveragedData):
    """All parameters are parts of one vector."""

    begins = -1

    def begin(self):
        self.vector = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        nn.utils.vector_to_parameters(self.vector, self.model.parameters())

    def after_step(self):
        self.kept = [self.vector.clone()]


class Clipped(Averaged):
    """Weights are clipped after each step."""

    def after_step(self):
        for parameter in self.held:
            parameter.data.clamp_(-0.2, 0.2)


class GradientsRead(Averaged):
    """Gradients are read after the step."""

    begins = BEGINS

    def after_step(self):
        if hasattr(self, "held"):
            norm = nn.utils.clip_grad_norm_(self.held, 1e9)
            self.kept = [norm, *(parameter.grad.clone() for parameter in self.held)]


class GroupsRead(Script):
    def after_step(self):
        groups = self.distributed.param_groups
        self.kept = [p.detach().clone() for group in groups for p in group["params"]]


class Saved(Averaged):
    begins = BEGINS

    def after_step(self):
        if hasattr(self, "held"):
            file = io.BytesIO()
            torch.save((self.held, copy.deepcopy(self.held)), file)
            file.seek(0)
            self.kept = [p.detach() for part in torch.load(file) for p in part]


WAIT_ALL = (
    Script,
    Functional,
    Stateless,
    OwnOperation,
    DirectForward,
    Replicas,
    Checkpointed,
    CheckpointedReentrant,
    GraphModule,
    Exported,
    Shared,
)
#: Each compiles, which takes seconds; ``CompiledLate`` and others below stand for them.
COMPILED = (
    Compiled,
    CompiledBefore,
    CompiledByEager,
    CompiledInPlace,
    CompiledFunction,
    CompiledAfterReset,
)
#: One for each reason.
REPORTED = (CompiledLate, AveragedData, Traced)
NEVER_WAIT = (
    CompiledAdam,
    CompiledClosure,
    TracedBefore,
    Scripted,
    Flattened,
    AveragedDataLate,
    AveragedArrays,
)
#: They reach for parameters right after the step, or have few that wait.
OTHERS = (Normalized, Averaged, Clipped, GradientsRead, GroupsRead, Saved)


def compare(scripts, chosen=LATE):
    for script in scripts:
        results = []
        for order in (chosen, ARRIVAL):
            torch._dynamo.reset()
            torch.manual_seed(2)
            job = script(order)
            results.append(job.train())
            if order is chosen:
                late = job.late
                parameters = len(list(job.model.parameters()))
        torch._dynamo.reset()
        try:
            assert_identical(*results)
        except AssertionError as error:
            raise AssertionError(script.__name__) from error
        assert script not in WAIT_ALL or late == parameters, (script, late)
        never = (*NEVER_WAIT, *REPORTED, *COMPILED, Transformed)
        assert script not in never or late == 0, (script, late)


def case_scripts_whose_reading_is_seen():
    skip_unless_steps_wait()
    compare(WAIT_ALL)
    compare(OTHERS)


def case_scripts_whose_reading_is_seen_in_buckets():
    skip_unless_steps_wait()
    compare((Script, Stateless, Averaged, Checkpointed, GradientsRead), IN_BUCKETS)


def case_scripts_whose_reading_is_not_seen():
    skip_unless_steps_wait()
    compare(NEVER_WAIT)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        compare(REPORTED)
    lines = said.getvalue().splitlines()
    reasons = ["torch.compile compiles", "also part of other tensors", "torch.jit makes"]
    expected = reasons if hvd.rank() == 0 else []
    assert [any(text in line for line in lines) for text in reasons] == [bool(expected)] * 3, lines
    assert len([line for line in lines if "also part" in line]) == (hvd.rank() == 0)


def case_compiled_scripts_whose_reading_is_not_seen():
    skip_unless_steps_wait()
    compare(COMPILED)


class Unseen(Script):
    """Reads parameters as C++ does, which calls nothing of Python's."""

    def begin(self):
        self.held = list(self.model.parameters())

    def forward(self, x):
        if not hasattr(self, "held"):
            return self.model(x)
        with torch._C.DisableTorchFunctionSubclass():
            weight, bias = self.held[:2]
            return self.model[1:](nn.functional.linear(x, weight, bias))


class UnseenLate(Unseen):
    begins = BEGINS


class Transformed(Functional):
    """Transforms compute the gradients: they are given to parameters without a backward pass."""

    def step(self, x):
        if not hasattr(self, "held"):
            super().step(x)
            return
        gradients = torch.func.grad(lambda held: network(held, x).pow(2).mean())(self.held)
        for name, parameter in self.held.items():
            parameter.grad = gradients[name]


class TransformedLate(Transformed):
    begins = BEGINS

    def forward(self, x):
        return self.model(x)


def case_reading_that_nothing_sees_is_found_in_rehearsals():
    skip_unless_steps_wait()
    compare((Unseen,))
    job = Unseen(LATE)
    job.train()
    assert job.late == 4
    compare((Transformed,))
    for late in (UnseenLate, TransformedLate):
        with raises(AutosyncError, "without Python's knowledge"):
            late(LATE).train()
