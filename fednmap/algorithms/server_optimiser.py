"""FedAvgM, FedAdagrad, FedAdam and FedYogi: another optimiser on the server of a method.

FedAvgM: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. The others: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, Adaptive Federated
Optimization, ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from fednmap.algorithms.fedavg import FedAvg
from fednmap.core import Algorithm, Compressor, Oracle, Regularizer, State, extended
from fednmap.names import InputError
from fednmap.regularizers.parameters import below_one, positive, regularizer, shown

PASSED_ON = ("phi", "eta_a", "eta_s", "Q")


@dataclass(frozen=True)
class ServerOptimiser(Algorithm):
    """A method `of` whose server takes another step; clients, messages and corrections are those of the method.

    The method's own server step goes from x to y, where x is the field that `Traits.server_variable` names. The
    optimiser replaces that step by its own, computed from $d = y - x$; the other fields of the server's state are
    updated by the method. Both have the same fixed points, those with $d = 0$.

    >>> from fednmap.algorithms import FedAvgM, SCAFFOLD
    >>> FedAvgM(of=SCAFFOLD(eta_a=0.1, Q=5)).Q
    5
    """

    phi: Regularizer = None  # type: ignore[assignment]  # given, or the method's; as the next three
    eta_a: float = None  # type: ignore[assignment]
    eta_s: float = None  # type: ignore[assignment]
    Q: int = None  # type: ignore[assignment]
    of: Algorithm = field(default_factory=FedAvg, kw_only=True)

    traits = replace(FedAvg.traits, server_variable=None)  # those of the method, once it is known
    kept: ClassVar[tuple[str, ...]]
    """The optimiser's own vectors on the server."""

    def __post_init__(self) -> None:
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if "phi" in given:
            regularizer(self, "phi")
        if not isinstance(self.of, Algorithm) or not is_dataclass(self.of):
            raise InputError(
                f"{self.name}: of is {shown(self.of)}; it must be a method, such as SCAFFOLD(eta_a=0.1, Q=10)"
            )
        of = cast(Algorithm, self.of)
        if of.traits.server_variable is None:
            raise InputError(
                f"{self.name} cannot be of {of.name}, whose server takes no step that could be another one; "
                "use FedAvg, FedProx, SCAFFOLD, FedNMap or CompressedFedNMap"
            )
        own = {f.name for f in fields(self.of) if f.init}
        if strange := [name for name in given if name not in own]:
            raise InputError(f"{self.name}: {of.name} has no {strange[0]}; leave it out")
        if given:
            of = replace(self.of, **given)
        object.__setattr__(self, "of", of)
        object.__setattr__(self, "traits", replace(of.traits, broadcast_follows=False, server_variable=None, rate="-"))
        for name in own.intersection((*PASSED_ON, "gamma")):
            object.__setattr__(self, name, getattr(of, name))

    @abstractmethod
    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the optimiser's vectors before the first round."""

    @abstractmethod
    def step(self, x: Tensor, y: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """Return the new x, and the optimiser's new vectors, where the method would go from x to y."""

    def init(self, start: Tensor) -> tuple[State, State]:
        server, client = self.of.init(start)
        return extended(type(server), self.kept)(*server, *self.begin(start)), client

    def broadcast(self, server: State) -> State:
        return self.of.broadcast(self._below(server))

    def local(self, down: State, client: State, g: Oracle) -> tuple[State, State]:
        return self.of.local(down, client, g)

    def state_after_sending(self, down: State, client: State, up: State, sent: State) -> State:
        return self.of.state_after_sending(down, client, up, sent)

    def aggregate(self, server: State, up: State, share: float) -> State:
        before, kept = self._below(server), server[-len(self.kept) :]
        after = self.of.aggregate(before, up, share)
        name = cast(str, self.of.traits.server_variable)
        x, *kept = self.step(getattr(before, name), getattr(after, name), *kept)
        return type(server)(*after._replace(**{name: x}), *kept)

    def model(self, server: State) -> Tensor:
        return self.of.model(self._below(server))

    def known_gradient(self, before: State, after: State) -> tuple[Tensor, Tensor] | None:
        return self.of.known_gradient(self._below(before), self._below(after))

    def extra_metrics(self, server: State) -> dict[str, float]:
        return self.of.extra_metrics(self._below(server))

    def compression(self) -> Compressor | None:
        return self.of.compression()

    def _below(self, server: State) -> State:
        """The server's state as the method knows it."""
        return type(server).below(*server[: -len(self.kept)])


@dataclass(frozen=True)
class FedAvgM(ServerOptimiser):
    r"""FedAvgM is a method with momentum on the server; as published, FedAvg.

    Where the method would go from $x$ to $y$, the server takes

    $$m = \beta m + (y - x), \qquad x = x + m.$$

    of:   the method, FedAvg if none is given: also FedProx, SCAFFOLD, FedNMap (whose z is moved), CompressedFedNMap.
    beta: momentum, in [0, 1); 0 is the method itself.
    phi, eta_a, eta_s, Q: those of the method, unless they are given here.

    For FedAvg, $y - x$ is eta_s times the mean change of the clients' models. Momentum makes steps of
    $\eta_s / (1 - \beta)$ in the long run. A method that ends exactly does so with momentum too.

    >>> from fednmap.algorithms import SCAFFOLD
    >>> FedAvgM(of=SCAFFOLD(eta_a=0.1, Q=5)).traits.fixed_point.value
    'exact'
    """

    beta: float = 0.9

    kept = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "beta")

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(x),)

    def step(self, x: Tensor, y: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        (m,) = kept
        return y + self.beta * m, self.beta * m + (y - x)


@dataclass(frozen=True)
class _Adaptive(ServerOptimiser):
    """Algorithm 2 of Reddi et al.; a subclass says how v changes."""

    eta: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    kept = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "eta", "tau")
        below_one(self, "beta1", "beta2")

    @abstractmethod
    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round in which d has this square."""

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(x), torch.full_like(x, self.tau**2)

    def step(self, x: Tensor, y: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        (m, v), d = kept, y - x
        m = self.beta1 * m + (1 - self.beta1) * d
        v = self._second(v, d.square())
        return x + self.eta * m / (v.sqrt() + self.tau), m, v


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    r"""FedAdagrad is a method with Adagrad on the server; as published, FedAvg.

    With $d = y - x$, where the method would go from $x$ to $y$, the server takes

    $$m = \beta_1 m + (1 - \beta_1) d, \qquad v = v + d^2, \qquad x = x + \eta m / (\sqrt{v} + \tau).$$

    of:  the method, FedAvg if none is given: also FedProx, SCAFFOLD, FedNMap (whose z is moved), CompressedFedNMap.
    eta: server step, about how far a coordinate moves in a round at most.
    tau: degree of adaptivity: the smaller the more; v begins at $\tau^2$.
    phi, eta_a, eta_s, Q: those of the method, unless they are given here.

    For FedAvg with $\eta_s = 1$, d is the mean change of the clients' models, as published.

    >>> FedAdagrad(eta_a=0.1, Q=5).tau
    0.001
    """

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    r"""FedAdam is a method with Adam on the server: FedAdagrad with $v = \beta_2 v + (1 - \beta_2) d^2$.

    As published without Adam's correction of the first rounds. Parameters as in `FedAdagrad`.

    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> FedAdam(of=FedNMap(L1(0.1), eta_a=0.1, Q=5)).traits.composite
    True
    """

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    r"""FedYogi is a method with Yogi on the server: FedAdagrad with $v = v - (1 - \beta_2) d^2 \sign(v - d^2)$.

    Parameters as in `FedAdagrad`.

    >>> FedYogi(eta_a=0.1, Q=5).beta1
    0.9
    """

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
