"""Every method meets the contract and ends where its traits say, measured on a heterogeneous lasso."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from lasso import PHI, PROBLEM, L, best, distance, last, models
from methods import MAKE

from fednmap import algorithms as A
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import FixedPoint, Regularizer, nbytes, pack, unpack, with_fields
from fednmap.names import InputError
from fednmap.regularizers import L1, Zero
from fednmap.testing import check_algorithm

EXACT = [name for name, make in MAKE.items() if make(Zero(), 1.0, 1).traits.fixed_point is FixedPoint.EXACT]


def test_every_method_has_a_maker_and_a_name():
    tested_elsewhere = {"FedNMapMemory"}  # tests/algorithms/test_memory.py
    assert {cls.__name__ for cls in A.ALGORITHMS.values()} == set(MAKE) | tested_elsewhere


@pytest.mark.parametrize("name", MAKE)
def test_contract(name):
    # a method that does not converge to the optimum has nothing to wait for
    report = check_algorithm(MAKE[name], rounds=1500 if name in EXACT else 60)
    if name in EXACT:
        assert all(distance < 1e-10 for distance in report if distance is not None)


def test_a_kind_of_fixed_point_that_is_only_a_word_is_noticed():
    class Typo(A.FedAvg):
        traits = replace(A.FedAvg.traits, fixed_point="exakt")

    with pytest.raises(AssertionError, match="fixed_point is 'exakt'; say a member of FixedPoint"):
        check_algorithm(lambda phi, L, Q: Typo(phi, eta_a=0.5 / (L * Q), Q=Q), rounds=1)


def test_who_starts_at_a_z():
    """Only there is gamma a prox parameter; in Fast-FedDA and EControlDA it is an inverse step."""
    starts = {name: make(Zero(), 2.0, 1).prox_parameter for name, make in MAKE.items()}
    normal_map = ("FedNMap", "CompressedFedNMap", "FedNewton", "NormalMapSGD")
    assert {name: gamma for name, gamma in starts.items() if gamma is not None} == dict.fromkeys(normal_map, 0.5)


@pytest.mark.parametrize("directions", [1, 2])
def test_steps_written_in_place_are_the_same_steps(directions):
    z, *given = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(3, 10).sin().split(1)
    given = [v.expand(4, -1) for v in given[:directions]]  # of 4 clients; z is common to them
    step = LocalSteps(0.1)
    expected = z - 0.2 * sum(given)
    torch.testing.assert_close(step(step(z, *given), *given), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(step.mean(z, expected, 2), sum(given), rtol=1e-13, atol=1e-13)


def test_who_is_exact():
    biased = {"FedCanon", "FedDA", "FedMiD", "FastFedDA", "FedAvg", "PrunedFedAvg", "FedProx"}
    biased |= {"FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"}
    assert set(EXACT) == set(MAKE) - biased


def end(algorithm, eta_a):
    """Where the method ends; it needs the longer the smaller its step."""
    return algorithm.model(last(algorithm, rounds=round(30 / eta_a)).server)


BIASED = {
    "FedCanon": (lambda eta_a: A.FedCanon(PHI, eta_a=eta_a, Q=5), 0.2),
    "FedDA": (lambda eta_a: A.FedDA(PHI, eta_a=eta_a, Q=5), 0.2),
    "FedMiD, server only": (lambda eta_a: A.FedMiD(PHI, eta_a=eta_a, Q=5, server_only=True), 0.2),
    "FedAvg": (lambda eta_a: A.FedAvg(eta_a=eta_a, Q=5), 0.0),
    "FedProx": (lambda eta_a: A.FedProx(eta_a=eta_a, Q=5, mu=0.1), 0.0),
}


@pytest.mark.parametrize("name", BIASED)
def test_bias_is_proportional_to_the_local_step(name):
    make, weight = BIASED[name]
    one, half = (distance(end(make(eta_a / L), eta_a), best(weight)) for eta_a in (0.1, 0.05))
    assert 1e-3 < half < one < 0.05
    assert 1.85 < one / half < 2.15


def test_fedmid_says_where_it_ends_either_way():
    both, server = A.FedMiD(PHI), A.FedMiD(PHI, server_only=True)
    assert (both.traits.prox, both.traits.fixed_point) == ("Q + 1", FixedPoint.OF_F_PLUS_2_PHI)
    assert (server.traits.prox, server.traits.fixed_point) == ("0 + 1", FixedPoint.BIASED)
    assert A.FedMiD.traits == both.traits == replace(server, server_only=False).traits


@pytest.mark.parametrize("zeros", [0.25, 0.5, 0.75])
def test_of_entries_that_are_equally_small_as_many_are_pruned_as_is_said(zeros):
    method = A.PrunedFedAvg(zeros=zeros)
    x = torch.tensor([1.0, -1.0, 1.0, 5.0, -1.0, 1.0, 1.0, -1.0])
    model = method.model(method.Server(x))
    assert int((model == 0).sum()) == zeros * 8
    assert model[3] == 5.0
    assert torch.equal(model[model != 0], x[model != 0])


def test_fedmid_as_published_counts_phi_twice():
    points = [end(A.FedMiD(PHI, eta_a=eta_a / L, Q=5), eta_a) for eta_a in (0.1, 0.05, 0.025)]
    to_double = [distance(x, best(0.4)) for x in points]
    assert all(1.6 < one / half < 2.1 for one, half in pairwise(to_double))
    assert min(distance(x, best(0.2)) for x in points) > 0.1
    assert distance(best(0.4), best(0.2)) > 0.1


def test_fast_fedda_error_falls_as_one_over_t():
    algorithm = A.FastFedDA(PHI, Q=5, mu=0.1, gamma=2 * L)
    points = models(algorithm, PROBLEM, rounds=800)
    scaled = [t * distance(points[t - 1], best(0.2)) for t in (100, 200, 400, 800)]
    assert max(scaled) < 2
    growth = [later - earlier for earlier, later in pairwise(scaled)]
    assert growth[2] < growth[1] < growth[0]  # levels off: no error is left that does not fall with t


@pytest.mark.parametrize(("compressor", "K"), [("top", 1), ("random", 3), ("random", 0.5)])
def test_econtrolda_is_exact_with_every_compressor(compressor, K):
    algorithm = A.EControlDA(PHI, K=K, gamma=8 * L, compressor=compressor)
    assert distance(algorithm.model(last(algorithm, rounds=1600).server), best(0.2)) < 1e-10


@pytest.mark.parametrize("compressor", ["top", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_econtrolda_sends_k_values_and_k_indices(compressor, dtype):
    algorithm = A.EControlDA(PHI, K=3, compressor=compressor)
    round_ = last(algorithm, rounds=2, start=torch.zeros(PROBLEM.dim, dtype=dtype))
    assert round_.bytes_up == PROBLEM.n * 3 * (dtype.itemsize + 4)
    assert round_.bytes_down == PROBLEM.n * PROBLEM.dim * dtype.itemsize


def compressed(algorithm, t=0):
    """What the clients send in round t with no memory yet, and the gradients they started from."""
    server, client = algorithm.init(torch.ones(PROBLEM.dim, dtype=torch.float64))
    down = algorithm.broadcast(server._replace(A=server.A + t))._replace(x=server.z)
    clients = type(client)(*(v.expand(PROBLEM.n, -1) for v in client))
    g = PROBLEM.oracle(torch.arange(PROBLEM.n), 0)
    up, _ = algorithm.local(down, clients, g)
    return up, g(server.z, 0)


def test_top_k_keeps_the_largest():
    up, gradients = compressed(A.EControlDA(PHI, K=3))
    for sent, gradient in zip(up.D, gradients, strict=True):
        assert int((sent != 0).sum()) == 3
        assert gradient[sent == 0].abs().max() <= gradient[sent != 0].abs().min()
        assert torch.equal(sent[sent != 0], gradient[sent != 0])


def test_random_k_keeps_the_same_coordinates_on_all_clients_and_others_in_each_round():
    algorithm, seen = A.EControlDA(PHI, K=3, compressor="random"), torch.zeros(PROBLEM.dim)
    for t in range(40):
        up, gradients = compressed(algorithm, t)
        kept = up.D != 0
        assert torch.equal(kept, kept[:1].expand_as(kept))
        assert int(kept[0].sum()) == 3
        assert torch.equal(up.D[kept], gradients[kept])
        assert torch.equal(unpack(algorithm, pack(algorithm, up), up).D, up.D)
        seen += kept[0]
    assert seen.min() > 0
    other, _ = compressed(A.EControlDA(PHI, K=3, compressor="random", seed=1))
    first, _ = compressed(algorithm)
    assert not torch.equal(other.D != 0, first.D != 0)


def test_packing_works_for_one_client_and_for_a_stack():
    algorithm = A.EControlDA(PHI, K=2)
    up, _ = compressed(algorithm)
    one = type(up)(up.D[0])
    assert torch.equal(unpack(algorithm, pack(algorithm, one), one).D, one.D)
    assert nbytes(pack(algorithm, one)) == 2 * (8 + 4)
    assert pack(algorithm, up).indices.dtype == torch.int32


def randomness(algorithm, rounds=20):
    """What a method draws by itself: Scaffnew's numbers of steps, EControlDA's coordinates."""
    server, client = algorithm.init(torch.ones(40, dtype=torch.float64))
    for _ in range(rounds):
        down = algorithm.broadcast(server)
        up, _ = algorithm.local(down, client, lambda x, q: torch.ones_like(x))
        yield down, up
        server = algorithm.aggregate(server, up, 1.0)


@pytest.mark.parametrize(
    "algorithm",
    [
        A.Scaffnew(eta_a=0.1, Q=5),
        A.EControlDA(PHI, K=0.25, compressor="random"),
        A.CompressedFedNMap(PHI, K=0.25, compressor="random"),
    ],
    ids=lambda a: type(a).__name__,
)
def test_a_seed_decides_what_a_method_draws(algorithm):
    def drawn(seed):
        return [[v.tolist() for v in (*down, *up)] for down, up in randomness(with_fields(algorithm, seed=seed))]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(algorithm.seed) == [[v.tolist() for v in (*d, *u)] for d, u in randomness(algorithm)]
    assert algorithm.seed == 0  # a copy was seeded


def test_seeding_leaves_a_method_without_randomness_as_it_is():
    for name, make in MAKE.items():
        algorithm = make(Zero(), 1.0, 1)
        with_seed = name in ("Scaffnew", "EControlDA", "CompressedFedNMap")
        assert (with_fields(algorithm, seed=7) is algorithm) == (not with_seed)


class Weak(Regularizer):
    """-|x|^2: weakly convex with rho = 2."""

    rho = 2.0

    def value(self, x):
        return -x.square().sum(-1)

    def prox(self, v, step):
        return v / (1 - 2 * self.check_step(step))


REFUSED = {
    "gamma rho": lambda: A.FedNMap(Weak(), gamma=0.5),
    "normal map gamma rho": lambda: A.NormalMapSGD(Weak(), gamma=0.6),
    "local prox of Zhang": lambda: A.Zhang(Weak(), eta_a=0.05, Q=10, eta_s=0.1),
    "server prox of Zhang": lambda: A.Zhang(Weak(), eta_a=0.01, Q=10, eta_s=5.0),
    "alpha rho": lambda: A.FedCanon(Weak(), alpha=0.5),
    "r rho": lambda: A.FedDR(Weak(), r=0.5),
    "beta of FedADMM": lambda: A.FedADMM(Weak(), beta=2.0),
    "eta_a rho": lambda: A.ProxSGD(Weak(), eta_a=0.5),
    "FedDA convex": lambda: A.FedDA(Weak()),
    "FedMiD convex": lambda: A.FedMiD(Weak()),
    "FastFedDA convex": lambda: A.FastFedDA(Weak()),
    "EControlDA convex": lambda: A.EControlDA(Weak()),
    "Q of EControlDA": lambda: A.EControlDA(PHI, Q=2),
    "K": lambda: A.EControlDA(PHI, K=0),
    "K between": lambda: A.EControlDA(PHI, K=1.5),
    "compressor": lambda: A.EControlDA(PHI, compressor="best"),
    "bits": lambda: A.EControlDA(PHI, compressor="quantised", bits=3),
    "K of compressed": lambda: A.CompressedFedNMap(PHI, K=1.5),
    "compressor of compressed": lambda: A.CompressedFedNMap(PHI, compressor="best"),
    "bits of compressed": lambda: A.CompressedFedNMap(PHI, bits=2),
    "compressed gamma rho": lambda: A.CompressedFedNMap(Weak(), gamma=0.5),
    "newton gamma rho": lambda: A.FedNewton(Weak(), gamma=0.5),
    "newton size": lambda: A.FedNewton(PHI).init(torch.zeros(2001)),
    "beta": lambda: A.FedAvgM(beta=1.0),
    "beta1": lambda: A.FedAdam(beta1=1.0),
    "beta2": lambda: A.FedYogi(beta2=-0.1),
    "tau": lambda: A.FedAdagrad(tau=0.0),
    "alpha": lambda: A.FedDR(PHI, alpha=2.0),
    "mu of FedProx": lambda: A.FedProx(mu=-0.1),
    "mu infinite": lambda: A.FedProx(mu=float("inf")),
    "mu of FastFedDA": lambda: A.FastFedDA(PHI, mu=0.0),
    "negative gamma": lambda: A.FedNMap(PHI, gamma=-1.0),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_parameters_are_refused_in_one_line(what):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        REFUSED[what]()


def test_weakly_convex_steps_just_inside_are_taken():
    A.FedNMap(Weak(), gamma=0.49)
    A.Zhang(Weak(), eta_a=0.049, Q=10)
    A.FedADMM(Weak(), beta=2.1)
    assert A.FedNMap(Weak(), eta_a=1.0).gamma == 0.25
    assert A.FedDR(Weak(), eta_a=1.0).r == 0.25
    assert A.FedADMM(Weak(), eta_a=1.0).beta == 4.0


@pytest.mark.parametrize("name", [n for n in MAKE if n not in ("EControlDA", "FedNewton")])
@pytest.mark.parametrize("Q", [0, -1, 2.0, True, "5", None, torch.tensor(5)])
def test_local_steps_are_a_positive_integer(name, Q):
    cls = getattr(A, name)
    if Q is None and issubclass(cls, A.ServerOptimiser):  # the method's that it is of
        return
    with pytest.raises(ValueError, match="Q is"):
        cls(Zero(), Q=Q)


WRONG = {
    "eta_a is": [0.0, -0.1, float("nan"), float("inf"), "0.1", True, torch.tensor(0.1)],
    "phi is": [0.1, "l1:0.1", L1, None, torch.ones(30, 30), [L1(0.1)]],
}


def refused(name, what, value):
    """A method says what is wrong with a value in one line that names the argument."""
    with pytest.raises(InputError, match=rf"^\w+: {what} [^\n]*; it must be [^\n]*$") as caught:
        getattr(A, name)(value, L1(0.1)) if what == "phi is" else getattr(A, name)(Zero(), eta_a=value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(("what", "value"), [(what, v) for what, values in WRONG.items() for v in values], ids=str)
def test_a_wrong_value_is_refused_in_one_line(what, value):
    refused("FedNMap", what, value)


@pytest.mark.parametrize("name", MAKE)
def test_every_method_checks_its_arguments(name):
    for what, values in WRONG.items():
        refused(name, what, values[0])


@pytest.mark.parametrize("name", MAKE)
def test_numbers_of_numpy_are_stored_as_plain_ones(name):
    cls, Q = getattr(A, name), 1 if name == "EControlDA" else 5
    steps = {} if name == "FedNewton" else {"Q": Q}
    for eta_a in (np.float64(0.25), np.float32(0.25)):
        algorithm = cls(Zero(), eta_a=eta_a, **{name: np.int64(value) for name, value in steps.items()})
        assert algorithm == cls(Zero(), eta_a=0.25, **steps)
        assert all(type(getattr(algorithm, name)) is int for name in steps)
        assert type(algorithm.eta_a) is float


@pytest.mark.parametrize("seed", [-1, 0.5, True, "1"])
def test_seeds_are_integers_from_0(seed):
    for make in (
        A.Scaffnew,
        *(lambda seed, kind=kind: kind(PHI, seed=seed) for kind in (A.EControlDA, A.CompressedFedNMap)),
    ):
        with pytest.raises(InputError, match="seed is"):
            make(seed=seed)


@pytest.mark.parametrize("name", [n for n in MAKE if not MAKE[n](Zero(), 1.0, 1).traits.composite])
def test_smooth_methods_refuse_phi_and_name_composite_ones(name):
    with pytest.raises(ValueError, match="FedNMap, Zhang"):
        getattr(A, name)(L1(0.1))


def test_a_state_that_is_not_built_from_what_was_sent_is_noticed():
    """Whatever the traits say: the method is run with uplinks that are changed on their way."""

    class Forgetful(A.SCAFFOLD):
        traits = replace(A.SCAFFOLD.traits, control_variate=None)

        def state_after_sending(self, down, client, up, sent):
            return super().state_after_sending(down, client, up, up)

    def make(phi, L, Q):
        return Forgetful(phi, eta_a=0.5 / (L * Q), Q=Q)

    with pytest.raises(AssertionError, match="from the optimum with shortened uplinks"):
        check_algorithm(make)
