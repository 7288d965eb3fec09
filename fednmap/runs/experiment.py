"""From a configuration to the things it names: data, problem, regularizer, methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednmap import data as datasets
from fednmap.algorithms import WITH_MEMORY, ServerOptimiser
from fednmap.algorithms import method as served
from fednmap.algorithms.hyperparameters import safe_step
from fednmap.asynchronous import Asynchronous, rule_of, trace
from fednmap.core import Algorithm, Problem, Regularizer, oracle_of, with_fields
from fednmap.data import ClientData, Dataset
from fednmap.data.dataset import standardized
from fednmap.data.sparse import deviations, is_sparse
from fednmap.decentralized import Decentralized, DecentralizedAlgorithm, method, topology_of
from fednmap.measure import accuracy, problem_gamma, support
from fednmap.models import build
from fednmap.names import InputError
from fednmap.privacy import PrivateRows
from fednmap.privacy.example_level import gradients_per_round
from fednmap.problems import GLM, FiniteSum, LeastSquares, Logistic, Network, Pooled
from fednmap.problems.module_loss import batch_norm_layers
from fednmap.regularizers import Separable, Zero, parse, restrict
from fednmap.runs import uplink_config
from fednmap.runs.atomic_files import digest
from fednmap.runs.configuration import Config
from fednmap.simulation.participation import Trace, sampler_of
from fednmap.simulation.schedules import step_of
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool

OVERSHOT = 20.0  # eta_a times a smoothness of f beyond which a run is doubtful; from 2 on steps overshoot
UNSCALED = 1e3  # ratio of the columns' standard deviations, and size of the largest, beyond which a table is doubtful


@dataclass(frozen=True)
class Methods:
    """What a configuration names apart from data: the regularizer, the methods, and their starting points."""

    config: Config
    phi: Regularizer
    gamma: float
    """FedNMap's prox parameter, which also fixes the common first model prox(start, gamma)."""
    _built: dict[str, Algorithm] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: Config, module: nn.Module | None, coefficients: slice | None = None) -> Methods:
        """Checked as a whole: what does not fit is refused before anything runs.

        module:       the network, whose layers regularizers may name; None for a plain vector.
        coefficients: of a linear model with an intercept: phi acts on them alone. None: on all of x.
        """
        phi = parse(config.penalty, module)
        if coefficients is not None:
            phi = Separable([(coefficients, phi)])
        elif config.intercept:
            raise InputError(f"intercept is true, and only the machines with data know where it is in {config.model}")
        if config.penalty_only and not (module is None and config.penalty_only == "weights"):
            if module is None:
                raise InputError(
                    f"penalty_only is {config.penalty_only!r}, and {config.model} is not a network; it has `weights` "
                    "alone, and its intercept is never regularized"
                )
            phi = restrict(phi, module, config.penalty_only)
        methods = cls(config, phi, config.gamma or safe_step(phi, 4 * config.eta_a * config.eta_s * config.local_steps))
        for name in config.algorithms:
            algorithm = methods.algorithm(name)
            if config.schedule != "constant":
                step_of(algorithm)
        own = {name: methods.algorithm(name).name for name in config.algorithms if ":" in name}
        taken = [*config.algorithms, *config.labels.values(), *own.values()]
        labels = {name: label for name, label in own.items() if taken.count(label) == 1} | config.labels
        return replace(methods, config=config.model_copy(update={"labels": labels}))

    def algorithm(self, name: str) -> Algorithm:
        """Return the method with the common step sizes, its own defaults, and what `set` says about it; built once."""
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    def _build(self, name: str) -> Algorithm:
        config, kind = self.config, method(name)
        overrides: dict[str, Any]
        overrides = {key.rpartition(".")[2]: v for key, v in config.set.items() if key.rpartition(".")[0] == name}
        if kind in WITH_MEMORY and (memory := overrides.pop("memory", config.memory)):
            kind, overrides["memory"] = WITH_MEMORY[kind], memory
        common: dict[str, Any] = {"eta_a": config.eta_a, "eta_s": config.eta_s}
        if name != "econtrolda":
            common["Q"] = config.local_steps
        if config.memory:
            common["memory"] = config.memory
        if config.gamma is not None and kind.traits.normal_map:
            common["gamma"] = config.gamma  # else its own default, from the steps that are its own
        phi = self.phi if kind.traits.composite else Zero()
        optimiser = issubclass(kind, ServerOptimiser)
        if optimiser:
            of = overrides.get("of", "fedavg")
            if not isinstance(of, str) or issubclass(served(of), ServerOptimiser):
                raise InputError(f"{name}: of is {of!r}; name a method, such as --set {name}.of=scaffold")
            overrides["of"] = self.algorithm(of)
            phi, common = overrides["of"].phi, {}
        declared: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
        if "phi" not in declared:
            raise InputError(f"expected a method with a field phi, got {name} without; add `phi: Regularizer`")
        for option, plain in (("local_momentum", 0.0), ("local_decay", 1.0)):
            if (value := getattr(config, option)) != plain and not optimiser:
                if option not in declared:
                    can = "FedAvg, FedProx, SCAFFOLD or FedNMap"
                    raise InputError(f"{name} counts on equal local steps; leave {option} out, or use {can}")
                common[option] = value
        given = {k: v for k, v in common.items() if k in declared} | overrides
        needed = [k for k, f in declared.items() if f.init and f.default is f.default_factory is MISSING]
        if missing := [k for k in needed if k not in ("phi", *given)]:
            raise InputError(f"{name} also needs {', '.join(missing)}; give it with --set {name}.{missing[0]}=VALUE")
        algorithm = kind(phi, **given)  # type: ignore[call-arg]
        if "seed" not in overrides and not optimiser:  # whose method has its own
            algorithm = with_fields(algorithm, seed=config.seed)
        held = torch.finfo(getattr(torch, config.dtype))
        for parameter, value in vars(algorithm).items():
            if isinstance(value, float) and value and not held.tiny <= abs(value) <= held.max:
                allowed = f"{config.dtype} holds numbers from {held.tiny:.3g} up to {held.max:.3g}"
                raise InputError(f"{name}: {parameter} is {value:g}; {allowed}")
        if isinstance(algorithm, DecentralizedAlgorithm):
            assert config.topology is not None  # the configuration was checked for that
            return Decentralized(algorithm, topology_of(config.topology, config.clients))
        if config.asynchronous is None:
            return algorithm
        timing: dict[str, Any] = {name: getattr(config, name) for name in ("delays", "slowdown", "staleness")}
        return Asynchronous(algorithm, **timing, **rule_of(config.asynchronous))

    def start_from(self, first: Tensor, algorithm: Algorithm) -> Tensor:
        """Return where the method begins: all at the model x_0 = prox(first, gamma), so FedNMap at z_0 = first.

        (first - x_0) / gamma is a subgradient of phi at x_0, so z = x_0 + gamma' (first - x_0) / gamma has
        prox(z, gamma') = x_0 for a normal-map method with another gamma'.
        """
        x, gamma = self.phi.prox(first, self.gamma), algorithm.prox_parameter
        if gamma is None:
            return x
        return first if gamma == self.gamma else x + (gamma / self.gamma) * (first - x)


@dataclass(frozen=True, kw_only=True)
class Experiment(Methods):
    """One trial: every method runs on the same problem, from the same model, with the same minibatches."""

    dataset: Dataset
    problem: FiniteSum
    sample: FiniteSum | None = None
    """What is measured between the first round and the last; None: the problem itself."""

    @cached_property
    def measure_gamma(self) -> float:
        """gamma of |F_nat|^2: as set, else a property of the problem, whatever the methods and their steps."""
        with ThreadPool() as pool:
            whole = divided(self.problem, pool, here=True)
            return self.config.measure_gamma or problem_gamma(whole, self.phi, self.problem.start)

    @cached_property
    def digest(self) -> str:
        """Tells what the run is made from in files, the data and the trace of who takes part, from others."""
        sampler = sampler_of(self.config.sampler, self.config.participation)
        traced: dict[str, Any] = {"trace": sampler.rounds} if isinstance(sampler, Trace) else {}
        name, _, path = self.config.delays.strip().partition(":")
        traced |= {"delays": trace(Path(path))} if name == "trace" else {}
        return digest(traced | {"data": self.dataset.digest}) if traced else self.dataset.digest

    def start(self, algorithm: Algorithm) -> Tensor:
        """Return where the method begins."""
        return self.start_from(self.problem.start, algorithm)

    def problem_for(self, algorithm: Algorithm) -> FiniteSum | Pooled | PrivateRows:
        problem = uplink_config.private_rows(self.config, self.problem) or self.problem
        return Pooled(problem) if algorithm.traits.central else problem

    def metrics(self) -> dict[str, Callable[[Tensor], float]]:
        """Return the metrics beyond the objective: accuracy for labels, support recovery where the truth is known."""
        found: dict[str, Callable[[Tensor], float]] = {}
        if self.dataset.classes is not None:
            x_test, y_test = self.dataset.x_test, self.dataset.y_test
            found["test_accuracy"] = lambda x: accuracy(self.problem.predict(x, x_test), y_test)
        truth = self.dataset.truth
        if truth is not None and isinstance(self.problem, LeastSquares):
            mine = self.problem.coefficients
            found["support_precision"] = lambda x: support(x[mine], truth)[0]
            found["support_recall"] = lambda x: support(x[mine], truth)[1]
        return found

    def with_settings(self, **settings: Any) -> Experiment:
        """Return the same with other settings, on which data and problem do not depend."""
        config = self.config.model_copy(update=settings)
        if settings.keys() <= {"measure_gamma", "eval_every"}:  # no method depends on them
            return replace(self, config=config)
        return replace(self, **vars(Methods.of(config, architecture(self.problem), regularized(self.problem))))


def prepare(config: Config, loaded: Dataset | None = None) -> Experiment:
    """Load the data, divide it, build the model, the regularizer and the methods; replace `auto` by its meaning.

    loaded: what `load` returned for a configuration with the same data.
    """
    dataset = _typed(load(config) if loaded is None else loaded, config)
    config = _settled(config, dataset)
    if config.standardize:
        if is_sparse(dataset.x_train):
            raise InputError(f"{config.data} is sparse, and standardised columns would not be; leave --standardize out")
        if dataset.x_train.ndim != 2:
            raise InputError(f"{config.data} holds pictures, and --standardize is for tables; leave it out")
        linear = config.model in ("logistic", "least-squares")
        dataset = standardized(dataset, centre=config.intercept or not linear)
    _check(dataset, config)
    parts = datasets.partition(config.partition, dataset.y_train, config.clients, seed=config.seed, ids=dataset.clients)
    data = ClientData.split(dataset.x_train, dataset.y_train, parts)
    if "clients" in config.model_fields_set and config.clients != len(data):
        _warn(f"clients is {config.clients}, and {config.data} brings its own {len(data)}; these are used")
    config = config.model_copy(update={"clients": len(data)})
    if config.memory and config.batch_size:
        _warn("memory with minibatches: differences of noise are not curvature; use batch_size = 0, or memory = 0")
    problem = _problem(dataset, data, config)
    methods = Methods.of(config, architecture(problem), regularized(problem))
    algorithms = [methods.algorithm(name) for name in config.algorithms]
    if config.dp_clip is not None or config.aggregate != "mean" or config.attack is not None:
        uplink_config.check_methods(config, algorithms)
        rows = config.dp_clip is not None and config.dp_unit == "example"
        steps = max(map(gradients_per_round, algorithms)) if rows else 1
        config = uplink_config.with_noise(methods.config, problem, steps)
        methods = replace(methods, config=config)
    few = None
    if config.eval_samples is not None:
        few = _problem(dataset, data.thinned(config.eval_samples), config, data.sizes)
    for algorithm in algorithms:
        if algorithm.traits.hessians:  # refused here, where there is no folder yet
            algorithm.init(problem.start)
            oracle_of(algorithm, problem, torch.tensor(0, device="cpu"), 0)
    return Experiment(**vars(methods), dataset=dataset, problem=problem, sample=few)


def dataset_of(config: Config) -> Dataset:
    """Return the data set that a configuration names, in its precision and on its device."""
    return _typed(load(config), config)


def load(config: Config) -> Dataset:
    """Load the data set that a configuration names, as it is."""
    return datasets.load(config.data, **({"test": config.test} if config.test else {}))


def settled(experiment: Experiment) -> Experiment:
    """Return the same with measure_gamma in its configuration: all trials, workers and resumed runs share it."""
    return experiment.with_settings(measure_gamma=experiment.measure_gamma)


def architecture(problem: FiniteSum) -> nn.Module | None:
    """Return the network that a problem is made from; None for a regression."""
    return problem.architecture if isinstance(problem, Network) else None


def regularized(problem: Problem) -> slice | None:
    """Return the coefficients of a linear model with an intercept, which is not penalised; None where all of x is."""
    return problem.coefficients if isinstance(problem, GLM) and problem.intercept else None


def _typed(dataset: Dataset, config: Config) -> Dataset:
    """The data in the precision and on the device of the computation."""
    try:
        device = torch.zeros(0, device=config.device).device
        usable = device.type != "meta"  # which has shapes and no numbers
    except (RuntimeError, AssertionError):
        usable = False
    if not usable:
        raise InputError(f"device is {config.device!r}; this torch cannot use it, try cpu") from None

    def to(v: Tensor) -> Tensor:
        return v.to(device, getattr(torch, config.dtype)) if v.is_floating_point() else v.to(device)

    parts: dict[str, Any] = {k: to(getattr(dataset, k)) for k in ("x_train", "y_train", "x_test", "y_test")}
    return replace(dataset, **parts)


def _settled(config: Config, dataset: Dataset) -> Config:
    """Replace `auto` by its meaning for this data."""
    classifier = "logistic" if is_sparse(dataset.x_train) else "mlp:64:relu"
    meaning = {
        "partition": "sorted" if dataset.clients is None else "natural",
        "model": "least-squares" if dataset.classes is None else classifier,
    }
    config = config.model_copy(update={k: v for k, v in meaning.items() if getattr(config, k) == "auto"})
    linear = config.model in ("logistic", "least-squares")
    if config.intercept and not linear:
        raise InputError(f"intercept is for logistic and least-squares; {config.model} has its own biases")
    known = {"intercept": linear, "standardize": True} if dataset.of_sites else {}  # columns are far from 0
    return config.model_copy(update={k: v for k, v in known.items() if getattr(config, k) is None})


def _check(dataset: Dataset, config: Config) -> None:
    """Refuse data from which nothing can be learnt; warn of columns that no step size suits."""
    if dataset.y_train.ndim > 1:
        raise InputError(f"the targets of {config.data} are times and events; use fednmap.problems.Cox")
    if dataset.classes is not None and config.model == "least-squares":
        raise InputError(f"the targets of {config.data} are labels; use logistic, or csv:PATH,regression=true")
    if dataset.classes is not None and len(torch.unique(dataset.y_train)) < 2:
        raise InputError(f"all labels of {config.data} are the same; give data with two labels or more")
    if not dataset.as_given:
        return
    spread = deviations(dataset.x_train)
    varied = spread[spread > 0]
    if len(varied) and varied.max() > UNSCALED * min(1.0, float(varied.min())):
        _warn(
            f"the columns of {config.data} have standard deviations from {varied.min():.2g} to {varied.max():.2g}; "
            "add --standardize, or no step size suits them all"
        )
        return
    if is_sparse(dataset.x_train) or config.model not in ("logistic", "least-squares"):
        return
    bound = 0.25 if config.model == "logistic" else 1.0
    steep = bound * dataset.x_train.square().mean(0)  # the smoothness of f is at least the largest of them
    j = int(steep.argmax())
    if config.eta_a * float(steep[j]) > OVERSHOT:
        name = dataset.features[j] if dataset.features else f"{j}"
        _warn(
            f"column {name} of {config.data} is so large that steps of eta_a = {config.eta_a:g} overshoot far; add "
            f"--standardize, or use eta_a below {2 / float(steep[j]):.1g}"
        )


def _warn(line: str) -> None:
    warnings.warn(line, UserWarning, stacklevel=3)


def _problem(dataset: Dataset, data: ClientData, config: Config, sizes: Tensor | None = None) -> FiniteSum:
    """sizes: by which clients weigh, where `data` are fewer rows than they have."""
    options: dict[str, Any] = {"batch_size": config.batch_size or None, "seed": config.seed}
    if config.minibatches == "reshuffle":
        steps = 1 if config.topology else config.local_steps  # on a graph a round is a step
        options |= {"minibatches": config.minibatches, "local_steps": steps}
    if config.weights == "samples":
        counts = (data.sizes if sizes is None else sizes).double()
        options["weights"] = counts / counts.sum()
    if config.model == "least-squares":
        return LeastSquares(data, intercept=bool(config.intercept), **options)
    if config.model == "logistic":
        return Logistic(data, classes=dataset.classes, intercept=bool(config.intercept), **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = build(config.model, dataset).to(config.device, getattr(torch, config.dtype))
    if batch_norm_layers(module):  # f takes the statistics of rows that stand together, which partitions sort by label
        data = data.mixed(config.seed)
    loss = nn.functional.mse_loss if dataset.classes is None else nn.functional.cross_entropy
    return Network(module, loss, data, **options)
