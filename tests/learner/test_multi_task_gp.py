"""The multi-task GP against the explicit joint process of all tasks, and on BoTorch's seams."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import LinearMCObjective
from botorch.sampling.normal import SobolQMCNormalSampler

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner import Observation, fit
from hvd_autosync.learner.acquisition import Score
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.input_transform import StrategyInputs
from hvd_autosync.learner.kernel import MixedKernel
from hvd_autosync.learner.multi_task_gp import MultiTaskGP
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.outcome_transform import StepTimes
from hvd_autosync.learner.points import FloatArray, sobol_points
from hvd_autosync.learner.prior_functions import PriorFunction
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.projection import project_onto_space
from hvd_autosync.learner.source_posterior import SourcePosterior, source_posterior
from hvd_autosync.search_space import SearchSpace

Tell = Callable[..., Observation]


def without(space: SearchSpace, *names: str) -> SearchSpace:
    """The space without some knobs."""
    return SearchSpace(tuple(knob for knob in space.knobs if knob.name not in names))


def trained(
    space: SearchSpace,
    priors: tuple[PriorFunction, ...],
    points: FloatArray,
    log_step: FloatArray,
    seed: int,
    scale: float = 0.3,
) -> MultiTaskGP:
    """A model with random hyperparameters and noise that differs between trials."""
    rng = np.random.default_rng(seed)
    variance = rng.uniform(1e-4, 1e-2, len(points))
    model = MultiTaskGP(
        Features.of(space), priors, points, StepTimes(log_step, variance, -1.0, scale)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "noise" not in name:
                parameter += 0.4 * torch.from_numpy(rng.standard_normal(parameter.shape))
    return model.eval()


def test_inputs_are_those_of_the_points_whatever_another_thread_asks(
    mixed_space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = sobol_points(mixed_space, 3, seed=1)
    replaced = property(lambda _: (b"", torch.zeros(3, 1)), lambda *_: None)
    transform = StrategyInputs(Features.of(mixed_space), ())
    posterior = SourcePosterior(
        lambda one, other: one[..., :1] @ other[..., :1].mT,
        torch.eye(2).double(),
        torch.zeros(2).double(),
        torch.zeros(2, mixed_space.dimension).double(),
        torch.from_numpy,
        points[:1],
    )
    for owner in (StrategyInputs, SourcePosterior):
        monkeypatch.setattr(owner, "_last", replaced, raising=False)
    assert torch.equal(transform(torch.from_numpy(points)), transform.at(points))
    columns = posterior.columns(points)[:, -mixed_space.dimension :]
    assert torch.equal(columns, torch.from_numpy(points))


@dataclass(frozen=True)
class Related:
    """A source of the joint process: its space, trials, model and weight."""

    space: SearchSpace
    points: FloatArray
    log_step: FloatArray
    model: MultiTaskGP
    weight: float


def related(space: SearchSpace, count: int) -> list[Related]:
    """Sources whose spaces lack knobs of the target's, with 6 to 10 trials."""
    found = []
    for index in range(count):
        own = [space, without(space, "codec"), without(space, "groups", "group_fusion")][index % 3]
        points = sobol_points(own, 6 + index, seed=index)
        log_step = np.random.default_rng(index).normal(-1.0, 0.3, len(points))
        model = trained(own, (), points, log_step, seed=100 + index, scale=0.2 + 0.1 * index)
        found.append(Related(own, points, log_step, model, 0.9 - 0.3 * index))
    return found


def as_prior(space: SearchSpace, source: Related, std: float = 0.0) -> PriorFunction:
    known = source_posterior(source.model, source.space, space, own=False)
    weight = (source.weight,)
    return PriorFunction(
        "source", lambda points: known.mean(points)[:, None], weight, (std,), known
    )


def kernel_of(model: MultiTaskGP) -> Callable[[FloatArray, FloatArray], FloatArray]:
    """The prior covariance of a model's own function, in logarithms, at its own points."""
    features, scale = model.input_transform.features, model.outcome_transform.scale

    def covariance(one: FloatArray, other: FloatArray) -> FloatArray:
        with torch.no_grad():
            own = model.covar_module.own.forward(features(one), features(other))
        found: FloatArray = scale**2 * own.numpy()
        return found

    return covariance


def noise_of(model: MultiTaskGP) -> FloatArray:
    found: FloatArray = model.outcome_transform.scale**2 * model.likelihood.noise.detach().numpy()
    return found


def level_of(model: MultiTaskGP) -> float:
    constant = float(model.mean_module.constant)
    return model.outcome_transform.center + model.outcome_transform.scale * constant


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_it_is_the_joint_process_of_all_tasks_for_given_weights(
    mixed_space: SearchSpace, count: int
) -> None:
    """Every trial of every task, conditioned on at once, by the kernel over all tasks."""
    sources = related(mixed_space, count)
    points = sobol_points(mixed_space, 9, seed=50)
    log_step = np.random.default_rng(7).normal(-1.2, 0.3, len(points))
    priors = tuple(as_prior(mixed_space, source) for source in sources)
    model = trained(mixed_space, priors, points, log_step, seed=3)
    queries = sobol_points(mixed_space, 12, seed=60)

    default = mixed_space.encode(mixed_space.default)[None]
    latent = np.concatenate([queries, points])  # the target's function, then its trials
    own = kernel_of(model)
    joint = own(latent, latent)
    blocks, means, noises, values = [], [], [], []
    for source in sources:
        prior = kernel_of(source.model)
        here = project_onto_space(mixed_space, latent, source.space)
        start = project_onto_space(mixed_space, default, source.space)
        moved = prior(here, here) - prior(here, start) - prior(start, here) + prior(start, start)
        joint = joint + source.weight**2 * moved
        blocks.append(source.weight * (prior(here, source.points) - prior(start, source.points)))
        means.append(np.full(len(source.points), level_of(source.model)))
        noises.append(noise_of(source.model))
        values.append(source.log_step)
    sizes = [len(source.points) for source in sources]
    among = np.zeros((sum(sizes), sum(sizes)))
    begin = 0
    for source, size in zip(sources, sizes, strict=True):
        part = slice(begin, begin + size)
        among[part, part] = kernel_of(source.model)(source.points, source.points)
        begin += size
    everything = np.block([[joint, np.hstack(blocks)], [np.hstack(blocks).T, among]])
    noise = np.concatenate([noise_of(model), *noises])
    mean = np.concatenate([np.full(len(latent), level_of(model)), *means])
    seen = np.concatenate([log_step, *values])
    m = len(queries)
    covered = everything[m:, m:] + np.diag(noise)
    gain = np.linalg.solve(covered, everything[m:, :m]).T
    expected = mean[:m] + gain @ (seen - mean[m:])
    covariance = everything[:m, :m] - gain @ everything[m:, :m]

    with torch.no_grad():
        posterior = model.posterior(torch.from_numpy(queries))
    assert posterior.mean.squeeze(-1).numpy() == pytest.approx(expected, abs=1e-6)
    found = posterior.distribution.covariance_matrix.numpy()
    assert found == pytest.approx(covariance, abs=1e-6)


def test_integrated_weights_have_the_moments_of_samples(mixed_space: SearchSpace) -> None:
    """Mean and covariance of w f + g, with w and f drawn, before any trial of the target."""
    sources, deviations = related(mixed_space, 2), (0.4, 0.7)
    priors = tuple(
        as_prior(mixed_space, source, std) for source, std in zip(sources, deviations, strict=True)
    )
    points = sobol_points(mixed_space, 4, seed=50)
    model = trained(mixed_space, priors, points, np.zeros(len(points)), seed=3)
    rng, draws = np.random.default_rng(0), 400_000
    drawn = level_of(model) + rng.multivariate_normal(
        np.zeros(len(points)), kernel_of(model)(points, points), draws
    )
    for source, prior, std in zip(sources, priors, deviations, strict=True):
        assert prior.source is not None
        columns = prior.source.columns(points)
        covariance = prior.source.covariance(columns, columns).numpy()
        function = rng.multivariate_normal(prior.source.mean(points), covariance, draws)
        drawn += rng.normal(source.weight, std, draws)[:, None] * function
    inputs, scale = model.input_transform.at(points), model.outcome_transform.scale
    with torch.no_grad():
        mean = model.outcome_transform.center + scale * model.mean_module(inputs).numpy()
        covariance = scale**2 * model.covar_module.forward(inputs, inputs).numpy()
    spread = drawn.std(axis=0).max()
    assert drawn.mean(axis=0) == pytest.approx(mean, abs=6 * spread / math.sqrt(draws))
    assert np.cov(drawn.T) == pytest.approx(covariance, abs=10 * spread**2 / math.sqrt(draws))


def test_far_from_the_trials_of_a_source_less_is_known(
    mixed_space: SearchSpace, tell: Tell
) -> None:
    """Before the target's second trial; sources at their means would be as sure everywhere."""
    measured = [
        mixed_space.decode(point)
        for point in sobol_points(mixed_space, 200, seed=1)
        if point[0] > 0.6 and point[1] < 0.4
    ]
    source = Source("s", None, mixed_space, tuple(tell(each) for each in measured), 0.9)
    default = mixed_space.default
    fitted = fit(Problem(mixed_space, sources=(source,)), [tell(default)])
    priors = [replace(prior, prior_std=(0.0,)) for prior in fitted.priors]
    near = mixed_space.complete(default.replacing(fusion=1 << 26, cycle=0.4))
    far = mixed_space.complete(default.replacing(fusion=0, cycle=90.0))
    x = torch.from_numpy(np.stack([mixed_space.encode(each) for each in (near, far)]))

    def variances(priors: list[PriorFunction]) -> tuple[float, float]:
        times = StepTimes(np.zeros(1), np.full(1, 1e-4), 0.0, 0.1)
        trial = mixed_space.encode(default)[None]
        model = MultiTaskGP(Features.of(mixed_space), priors, trial, times).eval()
        with torch.no_grad():
            variance = model.posterior(x).variance
        return float(variance[0]), float(variance[1])

    exact, at_means = variances(priors), variances([replace(p, source=None) for p in priors])
    near_added, far_added = (one - other for one, other in zip(exact, at_means, strict=True))
    assert near_added >= 0
    assert far_added > 4 * near_added
    assert far_added > 0.25 * at_means[1]


@pytest.fixture
def model(mixed_space: SearchSpace) -> MultiTaskGP:
    """A target with two sources and ten trials."""
    priors = tuple(as_prior(mixed_space, source, 0.4) for source in related(mixed_space, 2))
    points = sobol_points(mixed_space, 10, seed=50)
    log_step = np.random.default_rng(7).normal(-1.2, 0.3, len(points))
    return trained(mixed_space, priors, points, log_step, seed=3)


def test_conditioning_on_more_trials_is_having_had_them(
    mixed_space: SearchSpace, model: MultiTaskGP
) -> None:
    more = sobol_points(mixed_space, 3, seed=70)
    values = np.array([-1.0, -1.4, -0.9])
    queries = torch.from_numpy(sobol_points(mixed_space, 6, seed=60))
    scale = model.outcome_transform.scale
    launches = model.likelihood.second_noise.detach()  # whole noise: known and of launches
    model.posterior(queries)  # as BoTorch asks: it fills the caches
    conditioned = model.condition_on_observations(
        torch.from_numpy(more),
        torch.from_numpy(values)[:, None],
        noise=torch.full((3, 1), 1e-3 / scale**2, dtype=torch.float64) + launches,
    )
    known = model.likelihood.noise_covar.noise.detach().numpy() * scale**2
    center = model.outcome_transform.center
    times = StepTimes(
        np.concatenate([center + scale * model.train_targets.numpy(), values]),
        np.concatenate([known, np.full(3, 1e-3)]),
        center,
        scale,
    )
    points = np.concatenate([sobol_points(mixed_space, 10, seed=50), more])
    transform = model.input_transform
    fitted = MultiTaskGP(transform.features, transform.priors, points, times)
    own = {name: value for name, value in model.state_dict().items() if "raw_noise" in name}
    own |= {name: p.detach() for name, p in model.named_parameters()}
    fitted.load_state_dict(own, strict=False)
    fitted.eval()
    with torch.no_grad():
        found, expected = conditioned.posterior(queries), fitted.posterior(queries)
    assert torch.allclose(found.mean, expected.mean, atol=1e-6)
    assert torch.allclose(found.variance, expected.variance, atol=1e-6)


def test_points_have_no_gradient(mixed_space: SearchSpace, model: MultiTaskGP) -> None:
    points = torch.from_numpy(sobol_points(mixed_space, 3, seed=1)).requires_grad_()
    with pytest.raises(ConfigurationError, match="no gradient") as caught:
        model.posterior(points)
    assert "optimize_acqf_discrete" in caught.value.hint


@pytest.mark.parametrize("name", ["means", "stdvs"])
def test_a_state_of_another_unit_is_refused(model: MultiTaskGP, name: str) -> None:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    state[f"outcome_transform.{name}"] += 0.1
    with pytest.raises(RuntimeError, match=f"outcome_transform.{name} is"):
        model.load_state_dict(state)


def test_new_trials_need_their_noise(mixed_space: SearchSpace, model: MultiTaskGP) -> None:
    """As for BoTorch's own models with known noise."""
    more = torch.from_numpy(sobol_points(mixed_space, 3, seed=70))
    model.posterior(more)
    with pytest.raises(RuntimeError, match="noise"):
        model.condition_on_observations(more, torch.full((3, 1), -1.0, dtype=torch.float64))


def test_fantasies_are_one_model_per_sample(mixed_space: SearchSpace, model: MultiTaskGP) -> None:
    x = torch.from_numpy(sobol_points(mixed_space, 2, seed=70))
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasies = model.fantasize(x, sampler)
    queries = torch.from_numpy(sobol_points(mixed_space, 5, seed=60))
    with torch.no_grad():
        mean = fantasies.posterior(queries).mean
        assert mean.shape == (4, 5, 1)
        before, after = model.posterior(x).variance, fantasies.posterior(x).variance
    assert bool((after < before).all())


def test_candidates_are_judged_as_botorch_judges_them(mixed_space: SearchSpace, tell: Tell) -> None:
    """The values of our set of candidates are those of BoTorch on the model itself."""
    seen = [tell(mixed_space.decode(point)) for point in sobol_points(mixed_space, 20, seed=0)]
    source = Source("s", None, mixed_space, tuple(seen), 0.9)
    surrogate = fit(Problem(mixed_space, sources=(source,)), seen[:8])
    tried = np.stack([mixed_space.encode(each.strategy) for each in seen[:8]])
    pending = sobol_points(mixed_space, 2, seed=5)
    candidates = sobol_points(mixed_space, 30, seed=6)
    with isolated(0), torch.no_grad():
        inputs = surrogate.inputs(candidates)
        score = Score(surrogate, tried, pending, 0, None)(candidates, inputs)
    with isolated(0), torch.no_grad():
        reference = qLogNoisyExpectedImprovement(
            surrogate.model,
            X_baseline=torch.from_numpy(tried),
            sampler=SobolQMCNormalSampler(torch.Size([128]), seed=0),
            objective=LinearMCObjective(torch.tensor([-1.0], dtype=torch.float64)),
            X_pending=torch.from_numpy(pending),
            prune_baseline=True,
        )(torch.from_numpy(candidates).unsqueeze(-2))
    assert score == pytest.approx(reference.numpy(), abs=1e-8)


def test_the_kernel_has_the_gradients_of_its_values() -> None:
    kernel = MixedKernel(2, 1)
    numbers, others = torch.rand(2, 4, 2, dtype=torch.float64)
    codes = torch.tensor([[0.0], [1.0], [0.0], [2.0]], dtype=torch.float64)

    def covariance(
        x: torch.Tensor, lengthscale: torch.Tensor, rate: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        named = {"log_lengthscale": lengthscale, "log_rate": rate, "log_weight": weight}
        inputs, other = torch.cat([x, codes], dim=1), torch.cat([others, codes], dim=1)
        found: torch.Tensor = torch.func.functional_call(kernel, named, (inputs, other)).to_dense()
        return found

    parameters = [each.detach().clone().requires_grad_() for each in kernel.parameters()]
    assert torch.autograd.gradcheck(covariance, (numbers.requires_grad_(), *parameters))
