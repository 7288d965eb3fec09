"""A method whose server does not wait for everybody, as everything that runs and measures methods knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from fednmap.algorithms import FedAvg
from fednmap.asynchronous.delays import Delays, delays_of, factors
from fednmap.asynchronous.event_loop import rounds_of
from fednmap.core import Algorithm, OwnRounds, Problem, Regularizer, State, extended
from fednmap.names import InputError
from fednmap.simulation.loop import Round, integers

CLOCK = ("virtual_time", "staleness", "staleness_max", "counted_least", "counted_most")
"""Further fields of the server's state, also measured: the time; how late counted replies were, in versions, mean
and largest; how often the client that counted least, and most, was counted."""

JOB = 5
"""Length of the field `job` of a client's state: when its job ends (inf: it has none), then the arrays of `Ledger`."""


@dataclass(frozen=True)
class Asynchronous(OwnRounds):
    """A method whose server takes replies as they come: `fednmap.simulate` and `fednmap.run` take it like any other.

    A client works on the state (z_s, h_s) that it was sent, has one job in flight, and sends y_i as ever. The server
    reads from that how far the client's control variate moves, and takes the step of the method itself::

        reply made from version s:   dh_i = y_i - (z_s - x_s)/gamma - h_s        (= new h_i - old h_i)
        after some replies:          D = mean dh_i,   y = (z - x)/gamma + h + D
                                     z, h = the method's own `aggregate` of y:   h = h + (share of the clients) D

    So h is the mean of all h_i at any time, whatever the order, and the fixed point is the method's own. A lost reply
    moves neither side; its client starts again from the newest state. One round is one step of the server.

    method:    FedNMap or Zhang, which stay exact, or FedCanon, with its own bias; a method without client state, such
               as FedAvg or FedMiD, runs as in FedBuff, with more bias.
    delays:    how long jobs take: see `fednmap.asynchronous.delays_of`, or a function of (clients, jobs).
    slowdown:  a factor per client on its delays: `lognormal:1.2`, or `1,1,20`.
    buffer:    step when this many replies have arrived.
    window:    step when this much time has passed and a reply has arrived.
    deadline:  like window, but late replies are thrown away and their clients start again: not asynchronous, and
               biased where the same clients are always late; to compare with.
    staleness: wait for replies that would otherwise be later than this many versions.

    Without buffer, window and deadline the server waits for all jobs, and the rounds are those of `fednmap.simulate`.
    With both a buffer and a window it steps at whichever comes first. `participation` is the share of the clients that
    have a job at a time. The server must remember (z - x)/gamma + h of each version in flight, one vector each.

    >>> import fednmap
    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> method = Asynchronous(FedNMap(L1(0.2), eta_a=0.02, Q=5), delays="pareto:1.2", window=1)
    >>> result = fednmap.run(method, heterogeneous(), rounds=500, every=500)
    >>> result.final["stationarity"] < 1e-12, result.final["staleness_max"] > 1
    (True, True)
    """

    method: Algorithm
    delays: str | Delays = "constant"
    slowdown: str | None = None
    buffer: int | None = None
    window: float | None = None
    deadline: float | None = None
    staleness: int | None = None
    mixing: float | None = None
    """Of FedAsync: the weight of a client's model; None for the methods above."""
    discount: float = 0.0
    """Of FedAsync and FedBuff: a reply s versions late counts (1 + s)^-discount; 0 for methods with a correction."""
    eta_a: float = None  # type: ignore[assignment]  # given, or the method's
    phi: Regularizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        method = self.method
        if not isinstance(method, Algorithm) or isinstance(method, OwnRounds):
            shown = method.__name__ if isinstance(method, type) else type(method).__name__
            raise InputError(f"expected a method with a server, such as FedNMap(L1(0.1)), got {shown}")
        for name in ("buffer", "staleness"):
            if getattr(self, name) is not None:
                integers(**{name: (getattr(self, name), 1 if name == "buffer" else 0)})
        for name in ("window", "deadline", "mixing"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0 < value < inf):
                raise InputError(f"expected {name} to be a number above 0, got {value!r}")
        if self.deadline is not None and (self.buffer, self.window, self.staleness) != (None, None, None):
            raise InputError("deadline throws late replies away; leave buffer, window and staleness out, or deadline")
        if isinstance(self.delays, str):
            delays_of(self.delays, None, None, 0)
        factors(self.slowdown, None)
        if self.eta_a is None:
            object.__setattr__(self, "eta_a", getattr(method, "eta_a", None))
        elif self.eta_a != getattr(method, "eta_a", None):
            object.__setattr__(self, "method", replace(method, eta_a=self.eta_a))  # type: ignore[type-var]
        _check_readable(self)
        said = self.method.traits
        object.__setattr__(self, "gamma", method.prox_parameter)
        object.__setattr__(self, "phi", method.phi)
        object.__setattr__(self, "traits", replace(said, server_variable=None, broadcast_follows=False))

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def corrected(self) -> bool:
        """Whether the method has a control variate, so that late replies are exact."""
        return self.method.traits.control_variate is not None

    def simulate(self, problem: Problem, rounds: int, start: Tensor, **options: Any) -> Iterator[Round]:
        return rounds_of(self, problem, rounds, start, **options)

    def init(self, start: Tensor) -> tuple[State, State]:
        server, client = self.method.init(start)
        down = self.method.broadcast(server)
        number = start.new_zeros((), dtype=torch.float64)
        job = torch.tensor([inf, *[0] * (JOB - 1)], dtype=torch.float64, device=start.device)
        sent = tuple(f"sent_{name}" for name in down._fields)
        return (
            extended(type(server), CLOCK)(*server, *[number] * len(CLOCK)),
            extended(type(client), (*sent, "job"))(*client, *down, job),
        )

    def model(self, server: State) -> Tensor:
        return self.method.model(self.below(server))

    def extra_metrics(self, server: State) -> dict[str, float]:
        own = {name: float(getattr(server, name)) for name in CLOCK}
        return own | self.method.extra_metrics(self.below(server))

    @staticmethod
    def below(server: State) -> State:
        """Return the server's state as the method knows it."""
        return type(server).below(*server[: -len(CLOCK)])

    def ready(self, replies: int, in_flight: int, oldest: int, time_is_up: bool) -> bool:
        """Return whether the server steps now.

        replies:    how many have arrived since its last step; without one it waits.
        in_flight:  jobs whose replies have not; the oldest was sent `oldest` versions ago.
        time_is_up: whether a window has ended.
        """
        if not replies or (in_flight and self.staleness is not None and oldest >= self.staleness):
            return False
        enough = self.buffer is not None and replies >= self.buffer
        return not in_flight or enough or (self.window is not None and time_is_up)

    def read(self, down: State, up: State, late: Tensor) -> State:
        """Return what the server sums of replies made from `down`, `late` versions ago; of one client or a stack."""
        if self.corrected:
            return type(up)(self._moved(down, up))
        weight = (1 + late.to(up[0])).pow(-self.discount)
        if self.mixing is None:
            return type(up)(*(weight.unsqueeze(-1) * v for v in up))
        local = self.method.aggregate(down, up, 1.0)  # with eta_s = 1 the client's own model
        weight = (self.mixing * weight).unsqueeze(-1)
        return (weight, *(weight * v for v in local))

    def advance(self, server: State, mean: State, share: float) -> State:
        """Return the server's new state from the mean of what `read` returned."""
        if self.mixing is not None:
            weight, *models = mean
            return type(server)(*((1 - weight) * v + mixed for v, mixed in zip(server, models, strict=True)))
        if self.corrected:
            zero = type(mean)(torch.zeros_like(mean[0]))
            mean = type(mean)(mean[0] - self._moved(self.method.broadcast(server), zero))
        return self.method.aggregate(server, mean, share)

    def _moved(self, down: State, up: State) -> Tensor:
        """Return how far the control variate of a client that sends `up` moves: where one that was 0 ends."""
        rest = self.method.init(torch.zeros_like(up[0]))[1]
        after = self.method.state_after_sending(down, rest, up, up)
        return getattr(after, str(self.method.traits.control_variate))  # type: ignore[no-any-return]


def times_counted(round: Round) -> Tensor:
    """Return how often each client's reply was counted until this round of an asynchronous run.

    >>> import fednmap
    >>> from fednmap.testing import heterogeneous
    >>> *_, last = fednmap.simulate(FedBuff(buffer=2), heterogeneous(), rounds=3)
    >>> times_counted(last).tolist()
    [1, 1, 1, 1, 1, 1]
    """
    counts: Tensor = round.clients[torch.arange(round.clients.n, device="cpu")].job[:, -1].long()
    return counts


def FedBuff(
    method: Algorithm | None = None, *, buffer: int = 10, discount: float = 0.0, **options: Any
) -> Asynchronous:
    """Return FedBuff: the mean of a buffer of stale changes, as if they were fresh.

    Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba, Federated Learning with Buffered Asynchronous Aggregation,
    AISTATS 2022, Algorithm 1: w moves by eta_g times the mean of K changes; eta_g is `eta_s` of the method. With a
    regularizer use FedMiD, whose local steps are proximal. discount=0.5 is the paper's staleness scaling.

    >>> FedBuff(buffer=5, delays="exponential").name
    'FedAvg'
    """
    return Asynchronous(FedAvg() if method is None else method, buffer=buffer, discount=discount, **options)


def FedAsync(
    method: Algorithm | None = None, *, mixing: float = 0.6, discount: float = 0.5, **options: Any
) -> Asynchronous:
    r"""Return FedAsync: $w = (1 - a) w + a w_i$ after every reply.

    Here $a = \text{mixing} \, (1 + \text{staleness})^{-\text{discount}}$.

    Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019, Algorithm 1 with the polynomial weight. Their
    local problem has a proximal term, as FedProx has. The method's eta_s must be 1.

    >>> FedAsync(mixing=0.5).buffer
    1
    """
    return Asynchronous(FedAvg() if method is None else method, buffer=1, mixing=mixing, discount=discount, **options)


def rule_of(spec: str) -> dict[str, Any]:
    """Return when the server steps: `all`, `buffer:K`, `window:TIME` or `deadline:TIME`; for others raise InputError.

    >>> rule_of("window:2"), rule_of("all")
    ({'window': 2.0}, {})
    """
    name, _, text = spec.strip().partition(":")
    if (name, text) == ("all", ""):
        return {}
    with suppress(KeyError, ValueError):
        value = {"buffer": int, "window": float, "deadline": float}[name](text)
        if 0 < value < inf:
            return {name: value}
    raise InputError(f"expected all, buffer:K, window:TIME or deadline:TIME, got {spec!r}; use window:2, say")


def safe_step(smoothness: float, staleness: int, *, largest: float | None = None, rho: float = 0.0) -> float:
    r"""Return the largest server step $\hat\eta = Q \eta_s \eta_a$ for which the theorem of docs/asynchronous.md holds.

    smoothness: the mean of the clients' L_i, at least the smoothness of f.
    staleness:  S, the most versions that a counted reply is late, as the setting `staleness` ensures it.
    largest:    the largest L_i; default: all are `smoothness`.
    rho:        the weak convexity of phi.

    With $\gamma = \hat\eta$, one local step, exact gradients, every client at work and no reply lost, $\psi$ then falls
    to a stationary point in any order of replies. Numbers out of range raise InputError. It is a worst case: without a
    bound on staleness, and on average, larger steps work.

    >>> safe_step(1.0, staleness=0), round(safe_step(1.0, staleness=5), 4)
    (0.4, 0.0444)
    """
    largest = smoothness if largest is None else largest
    if not 0 < smoothness <= largest or staleness < 0 or rho < 0:
        raise InputError(
            f"expected 0 < smoothness <= largest, staleness and rho of at least 0, got {smoothness}, {largest}, "
            f"{staleness} and {rho}"
        )
    return 1 / ((smoothness + rho) / 2 + (smoothness + largest) * (2 * staleness + 1))


def _check_readable(asynchronous: Asynchronous) -> None:
    """Refuse a method of which the server could not read from an uplink how far a client's state moves."""
    method, traits = asynchronous.method, asynchronous.method.traits
    name, use = method.name, "use FedNMap, Zhang or FedCanon, or a method without client state"
    if traits.full_participation or traits.central or traits.hessians:
        raise InputError(f"{name} needs every client in every round, and late replies are not fresh; {use}")
    rng = torch.Generator().manual_seed(0)
    start, y, old = (torch.randn(3, generator=rng, dtype=torch.float64) for _ in range(3))
    server, client = method.init(start)
    if not asynchronous.corrected:
        if len(client):
            raise InputError(f"{name} has a client state that is not a control variate; {use}")
        if asynchronous.mixing is not None and (asynchronous.buffer != 1 or getattr(method, "eta_s", 1.0) != 1):
            raise InputError("FedAsync mixes one client's model at a time: use buffer = 1 and eta_s = 1")
        return
    if asynchronous.mixing is not None or asynchronous.discount:
        raise InputError(f"{name} counts late replies in full; leave mixing and discount out, or use FedAvg")
    field = str(traits.control_variate)
    up = method.local(server, client, lambda x, q: torch.zeros_like(x))[0]
    readable = len(up) == len(client) == 1 and len(server) == 2
    if readable:
        up, mine = type(up)(y), type(client)(old)
        server = server._replace(**{field: old})
        down, moved = method.broadcast(server), asynchronous._moved(method.broadcast(server), up)
        truly = getattr(method.state_after_sending(down, mine, up, up), field) - old
        after = getattr(method.aggregate(server, up, 0.25), field)
        readable = bool(torch.allclose(moved, truly) and torch.allclose(after, old + 0.25 * moved))
        readable &= bool(torch.allclose(asynchronous._moved(down, type(up)(y + start)) - moved, start))
    if not readable:
        raise InputError(
            f"the uplink of {name} does not determine how far its client's state moves; {use}, and forget = 0"
        )
