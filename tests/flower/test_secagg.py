"""Secure aggregation: sums on a grid, masks that cancel, and a server that sees nothing else."""

import itertools
import json
import logging
import math
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import combinations
from multiprocessing import get_context

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import NAMES, Federation, make_problem
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fednmap import simulate
from fednmap.algorithms import FedAvg, FedDR, FedNMap
from fednmap.flower import masking, secure
from fednmap.flower.identity import make
from fednmap.flower.masking import PRIME, combine_shares, create_shares
from fednmap.flower.settings import Threshold, read
from fednmap.flower.state_store import ANSWERED, Answers
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1, Zero
from fednmap.simulation.quantised import Quantised
from fednmap.testing import optimum

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")


# the grid


@given(
    n=st.integers(2, 2000),
    bits=st.sampled_from([32, 64]),
    bound=st.floats(1e-6, 1e6),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_sums_on_the_grid_are_exact_and_what_was_sent_is_within_half_a_step(n, bits, bound, seed, dtype):
    grid = Quantised(n, bound, bits)
    rng = torch.Generator().manual_seed(seed)
    few = min(n, 5)
    vectors = torch.randn(few, 7, generator=rng, dtype=dtype)
    vectors *= 0.999 * bound / vectors.norm(dim=-1, keepdim=True)
    sent = grid.rounded(vectors)
    assert sent.dtype == dtype
    assert torch.equal(grid.rounded(sent), sent)
    assert float((sent - vectors).abs().max()) <= grid.step / 2
    total = sum(grid.levels(v) for v in vectors)
    whole = [sum(int(v) for v in column) for column in (sent.double() / grid.step).T.tolist()]
    assert total.view(f"int{bits}").tolist() == whole


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("n", [2, 3, 16, 1000])
def test_as_many_of_the_longest_vectors_as_there_are_clients_do_not_overflow(n, bits):
    grid = Quantised(n, 3.0, bits)
    for sign in (1.0, -1.0):
        level = grid.levels(torch.tensor([sign * 3.0, 0.0], dtype=torch.float64))
        total = (level.astype(object) * n % 2**bits).astype(level.dtype)
        assert grid.sum(total).tolist() == pytest.approx([sign * 3.0 * n, 0.0], abs=n * grid.step)


def test_the_step_is_a_power_of_two_and_no_finer_one_would_do():
    for n in (2, 3, 10, 1000):
        for bits in (32, 64):
            grid = Quantised(n, 5.0, bits)
            assert np.log2(grid.step) % 1 == 0
            assert n * 5.0 / grid.step < 2.0 ** (bits - 1) <= 4 * n * 5.0 / grid.step


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Quantised(4, bits=16), "use 32 or 64"),
        (lambda: Quantised(1), "at least 2"),
        (lambda: Quantised(4, bound=0.0), "above 0"),
        (lambda: Quantised(4, bound=1.0).rounded(torch.tensor([3.0, 4.0])), "norm 5, above the bound 1"),
        (lambda: Quantised(4).levels(torch.tensor([float("nan")])), "NaN or infinity"),
        (lambda: Quantised(4).levels(torch.tensor([float("inf")])), "NaN or infinity"),
    ],
)
def test_nothing_is_clipped(make, why):
    with pytest.raises(ValueError, match=why) as caught:
        make()
    assert "\n" not in str(caught.value)


# the simulator


def lasso(weights=None):
    problem = make_problem()
    return LeastSquares([problem.data[i] for i in range(4)], weights=weights)


@pytest.mark.parametrize("weights", [None, "uneven"])
@pytest.mark.parametrize("bits", [32, 64])
def test_on_the_grid_the_method_ends_at_the_optimum(weights, bits):
    problem = lasso([0.1, 0.2, 0.3, 0.4] if weights else None)
    algorithm, grid = FedNMap(L1(0.5), eta_a=0.1, Q=5), Quantised(4, 1e3, bits)
    *_, last = simulate(algorithm, problem, rounds=100, drop=0.2, uplink=grid)
    best = optimum(problem, L1(0.5))
    assert float((algorithm.model(last.server) - best).norm()) < 10 * grid.step + 1e-12
    h = last.clients[torch.arange(4)].h
    mean = h.mean(0) if weights is None else torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64) @ h
    assert float((mean - last.server.h).abs().max()) < 1e-12


def test_a_state_from_the_vector_that_was_not_sent_would_not_do(monkeypatch):
    """On a coarse grid: why `state_after_sending` is asked."""
    algorithm, problem, grid = FedNMap(L1(0.5), eta_a=0.1, Q=5), lasso(), Quantised(4, 2.0**26, 32)

    def drift():
        *_, last = simulate(algorithm, problem, rounds=60, uplink=grid)
        return float((last.clients[torch.arange(4)].h.mean(0) - last.server.h).abs().max())

    assert drift() < 1e-12
    monkeypatch.setattr(
        FedNMap, "state_after_sending", lambda self, down, client, up, sent: self.Client(up.y - sent.y + sent.y)
    )
    assert drift() > 1e-3


def test_a_grid_for_fewer_clients_than_come_is_refused():
    with pytest.raises(ValueError, match=r"sum of 3 vectors, and 4 clients .* use Quantised\(4\)$"):
        simulate(FedAvg(eta_a=0.1), lasso(), rounds=1, uplink=Quantised(3))
    simulate(FedAvg(eta_a=0.1), lasso(), rounds=1, participation=0.5, uplink=Quantised(2))


def test_bytes_up_are_those_of_the_ring():
    for bits in (32, 64):
        first = next(iter(simulate(FedAvg(eta_a=0.1), make_problem(), rounds=1, uplink=Quantised(4, 1e4, bits))))
        assert first.bytes_up == 4 * (6 + 1) * bits // 8


def test_a_method_that_cannot_is_refused():
    with pytest.raises(ValueError, match="FedDR has no state_after_sending") as caught:
        simulate(FedDR(Zero(), eta_a=0.1), make_problem(), rounds=1, uplink=Quantised(4))
    assert "\n" not in str(caught.value)


# the masks


def attempt(n, threshold, lost, bits=64, spoil=None, sums=2, k=1):
    """Sum k of those prepared, in which lost[j] leave before stage j: what the server gets, and the true sum."""
    grid = Quantised(n, 1e3, bits)
    vectors = torch.randn(n, 5, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    secrets, keys, boxes, masked, held, shares = {}, {}, {}, {}, {}, {}
    size = masking.SEALED
    for i in set(range(n)) - lost.get(1, set()):
        secrets[i], keys[i] = masking.begin("00000000-00000000", i, sums)
    for i in set(keys) - lost.get(2, set()):
        secrets[i], boxes[i] = masking.deal(secrets[i], keys, threshold)
    for i in set(boxes) - lost.get(3, set()):
        letters = {j: boxes[j][i][k * size : (k + 1) * size] for j in boxes if j != i}
        levels = masking.checked(grid.levels(vectors[i]))
        secrets[i], held[i], masked[i] = masking.mask(secrets[i], k, letters, threshold, levels)
        assert not (masked[i] == levels).any()
    for i in set(masked) - lost.get(4, set()):
        told = masking.reveal(held[i], i, masked, boxes.keys() - masked.keys(), threshold)
        for whose, share in told.items():
            shares.setdefault(whose, []).append(share)
    if spoil:
        spoil(shares, masked)
    total = sum(masked.values())
    public = {i: keys[i].mask[k * masking.KEY : (k + 1) * masking.KEY] for i in boxes}
    found = masking.proved(masking.uncover(total, masked, public, shares, threshold))
    return grid.sum(found), grid.rounded(vectors[list(masked)]).sum(0)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("stage", [1, 2, 3, 4])
@pytest.mark.parametrize("who", [*combinations(range(4), 1), (0, 3)])
def test_who_leaves_at_any_stage_is_survived_while_enough_stay(stage, who, bits):
    found, due = attempt(4, 2, {stage: set(who)}, bits)
    assert torch.allclose(found, due, rtol=0, atol=1e-12)


def test_some_leave_at_every_stage():
    found, due = attempt(7, 3, {1: {0}, 2: {6}, 3: {2}, 4: {4}})
    assert torch.allclose(found, due, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("stage", "why"), [(1, "take part"), (2, "take part"), (3, "a sum of 2"), (4, "2 shares")])
def test_with_fewer_than_the_threshold_there_is_no_sum(stage, why):
    with pytest.raises(ValueError, match=why):
        attempt(4, 3, {stage: {0, 1}})


def wrong_share(shares, masked):
    shares[2] = [share[:10] + bytes([share[10] ^ 1]) + share[11:] for share in shares[2]]


def wrong_vector(shares, masked):
    masked[2] = masked[2] + np.array([1, 0, 0, 0, 0, 0], dtype=masked[2].dtype)


@pytest.mark.parametrize("spoil", [wrong_share, wrong_vector])
@pytest.mark.parametrize("lost", [{}, {3: {2}}])
def test_a_mask_that_is_left_over_is_noticed(spoil, lost):
    if spoil is wrong_vector and lost:
        pytest.skip("it is not in the sum")
    with pytest.raises(ValueError, match=r"do not cancel|do not fit together|another key|no key"):
        attempt(4, 2, lost, spoil=spoil)


def test_a_client_refuses_keys_and_lists_that_cannot_be():
    (a, ka), (b, kb), (_, kc) = (masking.begin("00000000-00000000", i) for i in range(3))
    everybody = {0: ka, 1: kb, 2: kc}
    for wrong, why in (
        ({0: kb, 1: ka, 2: kc}, "other keys than this client sent"),
        ({0: ka}, "at least 2"),
        ({0: ka, 1: kb, 2: kb}, "same key"),
        ({1: kb, 2: kc}, "other keys"),
    ):
        with pytest.raises(ValueError, match=why):
            masking.deal(a, wrong, 2)
    a, _ = masking.deal(a, everybody, 2)
    b, others = masking.deal(b, everybody, 2)
    levels = masking.checked(Quantised(3).levels(torch.ones(4)))
    for letters, why in (({1: b"no letter"}, "decrypted"), ({7: others[0]}, "no keys"), ({2: others[0]}, "decrypted")):
        with pytest.raises(ValueError, match=why):
            masking.mask(a, 0, letters, 2, levels)
    _, held, _ = masking.mask(a, 0, {1: others[0]}, 2, levels)
    for alive, gone, why in (
        ([0, 1], [1], "does not fit"),
        ([0], [1], "a sum of 1"),
        ([1], [0], "does not fit"),
        ([0, 1, 2], [], "does not fit"),
    ):
        with pytest.raises(ValueError, match=why):
            masking.reveal(held, 0, alive, gone, 2)


def test_masks_are_uniform_and_never_the_same_twice():
    secrets = [masking.begin("00000000-00000000", i) for i in range(2)]
    seen = set()
    for _ in range(3):
        for i in range(2):
            secrets[i] = masking.begin("00000000-00000000", i)
        keys = {i: secrets[i][1] for i in range(2)}
        (a, _), (_, to_a) = (masking.deal(secrets[i][0], keys, 2) for i in range(2))
        _, _, covered = masking.mask(a, 0, {1: to_a[0]}, 2, np.zeros(20000, dtype=np.uint64))
        shares = covered.astype(np.float64) / 2.0**64
        assert abs(shares.mean() - 0.5) < 0.02
        assert abs(shares.std() - 12**-0.5) < 0.02
        assert not seen & set(covered.tolist())
        seen |= set(covered.tolist())


@pytest.mark.parametrize(("threshold", "number"), [(1, 1), (2, 2), (2, 5), (4, 7)])
def test_any_threshold_of_the_shares_give_the_secret_and_fewer_fit_any_secret(threshold, number):
    secret = bytes(range(32))
    shares = create_shares(secret, threshold, number)
    for some in itertools.permutations(shares, threshold):
        assert combine_shares(some) == secret
    if threshold > 1:
        fewer, other = shares[: threshold - 1], bytes(32)
        with pytest.raises(ValueError, match="do not fit"):
            combine_shares(fewer)
        # with a share that suits it, the fewer ones give any other secret: they exclude none
        x = number + 1
        points = {int.from_bytes(s[:2], "big"): int.from_bytes(s[2:], "big") for s in fewer} | {0: 0}
        y = sum(v * math.prod((x - o) * pow(k - o, -1, PRIME) for o in points if o != k) for k, v in points.items())
        assert combine_shares([*fewer, x.to_bytes(2, "big") + (y % PRIME).to_bytes(66, "big")]) == other


def test_a_known_polynomial_gives_known_shares(monkeypatch):
    """1234 + 166 x + 94 x^2, the example of the textbooks."""
    numbers = iter([166, 94])
    monkeypatch.setattr("secrets.randbelow", lambda below: next(numbers))
    shares = create_shares((1234).to_bytes(32, "big"), 3, 6)
    assert [int.from_bytes(s[2:], "big") for s in shares] == [1494, 1942, 2578, 3402, 4414, 5614]


@pytest.mark.parametrize("wrong", [[b""], [bytes(68)], [b"\0\1" + bytes(66)] * 2, [b"\0\1" + b"\xff" * 66]])
def test_shares_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="shares that"):
        combine_shares(wrong)


def test_two_clients_agree_on_a_secret_for_each_purpose_and_nobody_can_choose_it():
    (a, ka), (b, kb) = (masking.begin("00000000-00000000", i) for i in range(2))
    assert masking._agreed(a.mask, kb.mask, b"mask") == masking._agreed(b.mask, ka.mask, b"mask")
    assert masking._agreed(a.mask, kb.mask, b"mask") != masking._agreed(a.mask, kb.mask, b"share")
    with pytest.raises(ValueError, match="that is none"):
        masking._agreed(a.mask, bytes(32), b"mask")  # a point of small order: the secret would be known


def four_exchanges(stage, monkeypatch):
    """Where a message of the first two stages is to be disturbed: as if every sum were of other clients."""
    if stage in ("keys", "shares"):
        monkeypatch.setattr(secure.SecureSum, "_fits", lambda *_: False)


def test_a_sum_takes_two_exchanges_and_asks_as_many_to_unmask_as_suffice(tmp_path):
    """The keys of several sums are made at a time; every sum has its own."""
    federation = Federation(tmp_path, rounds=secure.PREPARED, eval_every=secure.PREPARED, **SECAGG)
    federation.start()
    kinds = [message.metadata.message_type for _, message in federation.grid.asked]
    sums = secure.PREPARED + 2  # two measurements
    assert kinds.count("train") + kinds.count("evaluate") == 4 * sums
    assert kinds.count("train.keys") == kinds.count("train.shares") == 4 * 2
    assert kinds.count("train.unmask") == 3 * sums
    orders = [m.content["secagg"] for n, m in federation.grid.asked if n == "anna" and "secagg" in m.content]
    used = [(order["keys"], order["sum"]) for order in orders if "sealed" in order]
    assert len(set(used)) == len(used) == sums


def test_who_does_not_unmask_is_replaced(tmp_path):
    asked = []

    def fault(name, message, answer):
        reply = answer()
        if message.metadata.message_type == "train.unmask":
            asked.append(name)
            return [] if len(asked) == 1 else [reply]
        return [reply]

    federation = Federation(tmp_path, rounds=1, eval_every=1, fault=fault, deadline=0.5, **SECAGG)
    assert federation.start()["took_part"] == dict.fromkeys(NAMES, 1)
    assert sorted(asked[:4]) == sorted(NAMES)
    assert drift(federation) < 1e-13


def signing(tmp_path, **more):
    """A federation whose nodes sign their keys, and know those of the others."""
    make(tmp_path / "keys", list(NAMES), "127.0.0.1")
    about = {"clients-file": str(tmp_path / "keys" / "clients.toml")}
    nodes = {101 + i: about | {"key": str(tmp_path / "keys" / name)} for i, name in enumerate(NAMES)}
    return Federation(tmp_path, rounds=2, deadline=0.5, **SECAGG, **more), nodes


def test_keys_that_nodes_sign_are_accepted(tmp_path):
    federation, nodes = signing(tmp_path)
    assert federation.start(about=nodes)["took_part"] == dict.fromkeys(NAMES, 2)


@pytest.mark.parametrize("signed", ["by bert, others", "by nobody", "by bert, earlier"])
def test_keys_that_the_server_puts_in_anothers_place_are_refused(tmp_path, signed, monkeypatch):
    """It would read the shares that the others deal to bert, and take off the masks that they share with him."""
    four_exchanges("shares", monkeypatch)
    federation, nodes = signing(tmp_path)
    fields, refused, earlier = ("mask", "share", "public", "signature"), [], []

    def swap(name, message, answer):
        if name == "anna" and message.metadata.message_type == "train.shares":
            order = message.content["secagg"]
            earlier.append(masking.PublicKeys(*(order[field][1] for field in fields)))
            own = masking.begin("", 1)[1]
            if signed == "by bert, others":
                own = own._replace(public=earlier[0].public, signature=earlier[0].signature)
            own = earlier[0] if signed == "by bert, earlier" else own
            for field, value in zip(fields, own, strict=True):
                order[field] = [value if i == 1 else v for i, v in enumerate(order[field])]
        reply = answer()
        refused.extend([reply.error.reason] if reply.has_error() else [])
        return [reply]

    federation.start(about=nodes, fault=swap)
    assert ("no public key" if signed == "by nobody" else "calls itself bert and its signature is wrong") in refused[0]


def test_a_client_that_forgot_what_was_prepared_costs_one_attempt(tmp_path):
    forgotten = []

    def forgets(name, message, answer):
        if name == "bert" and message.metadata.message_type == "train" and not forgotten:
            forgotten.append(message)
            if "keys" in message.content["secagg"]:
                federation.grid.contexts[message.metadata.dst_node_id].state.pop("secagg", None)
        return [answer()]

    federation = Federation(tmp_path, min_clients=4, fault=forgets, **SECAGG)
    federation.start()
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert float((ours - simulated).abs().max()) < 1e-10
    kinds = [message.metadata.message_type for name, message in federation.grid.asked if name == "anna"]
    assert kinds.count("train.keys") == 2


# between machines

SECAGG = {"secagg": True}


def drift(federation):
    """How far the server's h is from the mean of the clients' h_i."""
    h = torch.stack([state.h for state in federation.client_states()])
    return float((h.mean(0) - federation.server()[0].h).abs().max())


def error(federation):
    best = optimum(federation.problem, L1(0.5))
    return float((federation.plan().algorithm.model(federation.server()[0]) - best).norm() / best.norm())


METHODS = ["fednmap", "zhang", "fedcanon", "scaffold", "fedavg", "fedda"]


@pytest.mark.parametrize("method", METHODS)
def test_a_federation_is_what_the_simulator_says_and_what_it_is_without(tmp_path, method):
    given = {"algorithm": method, "penalty": "none" if method in ("scaffold", "fedavg") else "l1:0.5", "rounds": 3}
    given |= {"participation": 0.5, "seed": 3, "eval_every": 3, "batch_size": 4}
    federation = Federation(tmp_path, make_problem(batch_size=4), **given, **SECAGG)
    federation.start()
    (tmp_path / "plain").mkdir()
    plain = Federation(tmp_path / "plain", make_problem(batch_size=4), **given)
    plain.start()
    step = Quantised(4).step
    assert len(federation.server()[0]) == len(federation.simulated())
    for ours, simulated, clear in zip(federation.server()[0], federation.simulated(), plain.server()[0], strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-13)
        assert torch.allclose(ours, clear, rtol=0, atol=20 * step)


def test_on_a_coarse_grid_server_and_clients_agree_to_the_last_bit(tmp_path):
    """Steps of 0.03: a state from the vector before rounding would be off by as much."""
    coarse = {"secagg_bits": 32, "secagg_bound": 1e7}
    federation = Federation(tmp_path, rounds=4, eval_every=4, **SECAGG, **coarse)
    federation.start()
    assert Quantised(4, 1e7, 32).step > 0.02
    assert drift(federation) < 1e-12
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-13)


def numbers_in(message):
    """Every number that a message holds, and every run of bytes read as numbers."""
    found = []
    for record in message.content.values():
        if isinstance(record, ArrayRecord):
            found += [array.numpy().reshape(-1) for array in record.values()]
        elif isinstance(record, ConfigRecord):
            for value in record.values():
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, bytes):
                        for skip in range(8):
                            whole = one[skip : skip + (len(one) - skip) // 8 * 8]
                            found += [np.frombuffer(whole, np.int64), np.frombuffer(whole, np.float64)]
    return found


def shows(message, vectors, grid):
    """Whether one of the vectors can be read from the message: as it is, or as levels; a part of it suffices."""
    for values in numbers_in(message):
        for v in vectors:
            levels = np.rint(v / grid.step)
            if np.isin(v, values).any() or np.isin(levels, values.astype(np.float64)).any():
                return True
    return False


@pytest.mark.parametrize("secagg", [True, False])
def test_the_server_receives_no_unmasked_vector(tmp_path, monkeypatch, secagg):
    """Everything that reaches the server is looked through; without secure aggregation the same look finds them all."""
    vectors, received, totals = [], [], []
    local = FedNMap.local

    def watched(self, down, client, g):
        up, state = local(self, down, client, g)
        if bool(up.y.any()):  # not a dry run
            vectors.append(Quantised(4).rounded(up.y).numpy() if secagg else up.y.numpy().copy())
        return up, state

    mean_of = secure.mean_of
    monkeypatch.setattr(FedNMap, "local", watched)
    monkeypatch.setattr(secure, "mean_of", lambda *given: totals.append(mean_of(*given)) or totals[-1])

    def record(name, message, answer):
        received.append((message.metadata.message_type, reply := answer()))
        return [reply]

    federation = Federation(tmp_path, rounds=2, eval_every=2, secagg=secagg)
    federation.start(fault=record)
    assert len(vectors) == 8
    readable = [kind for kind, message in received if shows(message, vectors, Quantised(4))]
    assert readable.count(MessageType.TRAIN) == (0 if secagg else 8)
    if secagg:
        assert not readable
        means = [np.mean(vectors[4 * t : 4 * t + 4], axis=0) for t in range(2)]
        sums = [total.y for total in totals if isinstance(total, FedNMap.Up)]
        assert np.allclose(means, torch.stack(sums), rtol=0, atol=1e-12)
        measured = [m for kind, m in received if kind == MessageType.EVALUATE]
        assert measured
        assert all(sorted(m.content) == ["masked"] for m in measured)
        lines = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
        assert {line["client"] for line in lines} == {"*"}


def test_a_server_that_opens_one_mask_still_sees_nothing(tmp_path):
    """Of a client that is lost the server learns the key, of one that stays the seed; never both."""
    grid, n = Quantised(3), 3
    secrets, keys, boxes, masked, held = {}, {}, {}, {}, {}
    for i in range(n):
        secrets[i], keys[i] = masking.begin("00000000-00000000", i)
    for i in range(n):
        secrets[i], boxes[i] = masking.deal(secrets[i], keys, 2)
    seed = secrets[0].seeds
    levels = masking.checked(grid.levels(torch.ones(4)))
    for i in range(n):
        letters = {j: boxes[j][i] for j in range(n) if j != i}
        secrets[i], held[i], masked[i] = masking.mask(secrets[i], 0, letters, 2, levels)
        assert not any(secrets[i].mask + secrets[i].seeds + secrets[i].own)
    assert not ((masked[0] - masking.stream(seed, levels)) == levels).any()
    for i in range(2):
        for whose, share in masking.reveal(held[i], i, [0, 1], [2], 2).items():
            of_seed, of_key = held[i][whose]
            assert share == (of_key if whose == 2 else of_seed)


STAGES = {"keys": "train.keys", "shares": "train.shares", "masked": "train", "unmask": "train.unmask"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_is_lost_at_a_stage_keeps_its_state_and_the_method_stays_exact(tmp_path, stage, monkeypatch):
    """It computes, and its reply gets lost: in round 1, and in round 3 another one."""
    four_exchanges(stage, monkeypatch)
    kind, rounds = STAGES[stage], {"first": []}

    def fault(name, message, answer):
        reply = answer()
        ticket = message.content["secagg"]["ticket"] if "secagg" in message.content else "0000000x"
        lost = {1: "bert", 3: "anna"}.get(int(ticket[:8], 36))
        rounds["first"].append(ticket)
        return [] if name == lost and message.metadata.message_type == kind else [reply]

    federation = Federation(tmp_path, fault=fault, deadline=0.6, rounds=4, eval_every=4, **SECAGG)
    closing = federation.start()
    assert drift(federation) < 1e-12
    due = dict.fromkeys(NAMES, 4) | ({} if stage == "unmask" else {"bert": 3, "anna": 3})
    assert closing["took_part"] == due


def test_a_round_that_cannot_be_unmasked_is_repeated_and_nothing_is_counted_twice(tmp_path):
    lost = {"left": 2}

    def fault(name, message, answer):
        reply, kind = answer(), message.metadata.message_type
        lost["begun"] = lost.get("begun") or kind == "train"
        if lost["begun"] and kind == "train.unmask" and name in ("anna", "bert") and lost["left"]:
            lost["left"] -= 1
            return []
        return [reply]

    federation = Federation(tmp_path, fault=fault, deadline=0.5, rounds=3, eval_every=3, **SECAGG)
    federation.start()
    tickets = {m.content["round"]["ticket"] for _, m in federation.grid.asked if "round" in m.content}
    assert len(tickets) == 4
    assert drift(federation) < 1e-13
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-12)


def test_lost_and_restarted_nodes_and_a_resumed_server(tmp_path):
    """A node that restarts in the middle of a round has forgotten its keys and is left out of that round."""

    restarts = [True]

    def fault(name, message, answer):
        t = message.content["round"]["t"] if "round" in message.content else -1
        if name == "cleo" and t == 1 and restarts:
            del federation.grid.contexts[message.metadata.dst_node_id], restarts[0]
        return [answer()]

    federation = Federation(tmp_path, fault=fault, deadline=0.6, rounds=3, eval_every=3, **SECAGG)
    closing = federation.start()
    assert closing["took_part"] == dict.fromkeys(NAMES, 3) | {"cleo": 2}
    federation.start(resume=True, rounds=5, fault=lambda name, message, answer: [answer()])
    assert drift(federation) < 1e-12


def lossy(every):
    """One node is lost in every so many rounds: at another stage each time, and another one."""
    stages = list(STAGES.values())

    def fault(name, message, answer):
        reply = answer()
        kind = message.metadata.message_type
        if "secagg" not in message.content or kind == MessageType.EVALUATE:
            return [reply]
        t = int(message.content["secagg"]["ticket"][:8])
        k = t // every
        return [] if t % every == every - 1 and kind == stages[k % 4] and name == NAMES[k % 4] else [reply]

    return fault


def test_with_losses_the_optimum_is_reached(tmp_path):
    given = {"rounds": 30, "eval_every": 30, "deadline": 0.4, "local_steps": 1, "eta_a": 0.5, "gamma": 1.0}
    federation = Federation(tmp_path, fault=lossy(10), **given, **SECAGG)
    federation.start()
    assert error(federation) < 1e-6
    assert drift(federation) < 1e-12


@pytest.mark.slow
@pytest.mark.ci(turn=5)
@pytest.mark.parametrize("bits", [{}, {"secagg_bits": 32, "secagg_bound": 200.0}])
def test_after_200_rounds_with_a_node_lost_in_every_tenth_the_optimum_is_reached(tmp_path, bits):
    federation = Federation(tmp_path, fault=lossy(10), rounds=200, eval_every=200, deadline=0.6, **SECAGG, **bits)
    federation.start()
    assert error(federation) < (1e-6 if bits else 1e-11)
    assert drift(federation) < 1e-12


def asked(federation, kind):
    return next(m for name, m in federation.grid.asked if name == "anna" and m.metadata.message_type == kind)


@pytest.mark.parametrize("kind", ["train.shares", "train", "train.unmask", "evaluate"])
def test_a_stage_is_answered_once(tmp_path, kind):
    federation = Federation(tmp_path, rounds=1, eval_every=1, **SECAGG)
    federation.start()
    assert federation.grid.answer("anna", asked(federation, kind)).has_error()


def test_two_messages_at_once_get_one_answer(tmp_path):
    """Both find the stage due, as processes that began together do."""
    import copy

    answers = []

    def fault(name, message, answer):
        once = ("train.shares", "train", "train.unmask", "evaluate")
        if name != "anna" or message.metadata.message_type not in once:
            return [answer()]
        kept = federation.grid.contexts[message.metadata.dst_node_id]
        before = copy.deepcopy(kept.state)
        first, after = answer(), kept.state
        kept.state = before
        answers.append((first.has_error(), answer().has_error()))
        kept.state = after
        return [first]

    federation = Federation(tmp_path, rounds=1, eval_every=1, fault=fault, deadline=0.5, **SECAGG)
    federation.start()
    assert len(answers) == 7  # a measurement, a round and a measurement: the keys of the last two travel with others
    assert set(answers) == {(False, True)}


def test_a_vector_in_the_clear_is_refused(tmp_path):
    federation = Federation(tmp_path, rounds=1, **SECAGG)
    federation.start()
    for kind in ("train", "evaluate"):
        message = asked(federation, kind)
        clear = Message(
            RecordDict({k: v for k, v in message.content.items() if k != "secagg"}), message.metadata.dst_node_id, kind
        )
        reply = federation.grid.answer("anna", clear)
        assert "in the clear" in reply.error.reason


def test_a_client_may_insist(tmp_path):
    federation = Federation(tmp_path, rounds=1, attempts=1, deadline=0.5, min_clients=4)

    def fault(name, message, answer):
        node = message.metadata.dst_node_id
        if node in federation.grid.contexts:
            federation.grid.contexts[node].node_config["require-secagg"] = True
        return [answer()]

    with pytest.raises(TimeoutError, match="with secure aggregation alone"):
        federation.start(fault=fault)


def test_an_uplink_above_the_bound_stops_the_run_and_says_so(tmp_path):
    federation = Federation(tmp_path, norm_bound=1.0, attempts=2, deadline=0.5, **SECAGG)
    with pytest.raises(TimeoutError, match=r"round 0 failed 2 times \(anna: .*norm .* above the bound 1"):
        federation.start()


def test_garbage_in_a_stage_costs_that_client_the_round(tmp_path, caplog):
    def fault(name, message, answer):
        reply = answer()
        kind = message.metadata.message_type
        if name == "cleo" and kind.startswith("train."):
            reply = Message(
                RecordDict({"secagg": ConfigRecord({"mask": "x", "clients": [1], "data": [2]})}), reply_to=message
            )
        return [reply]

    federation = Federation(tmp_path, fault=fault, rounds=2, eval_every=2, **SECAGG)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        closing = federation.start()
    assert closing["took_part"] == {"anna": 2, "bert": 2, "cleo": 0, "dora": 2}
    assert "cleo: reply left out" in caplog.text
    assert drift(federation) < 1e-12


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"secagg-threshold": 5}, "secagg-threshold is 5, and 4 of 4 clients are drawn in a round; use at most 4"),
        ({"secagg-threshold": 3, "participation": 0.5}, "secagg-threshold is 3, and 2 of 4"),
        ({"secagg-threshold": 1}, "secagg_threshold"),
        ({"secagg-threshold": 2}, "secagg-threshold is 2 of 4 clients: .* use at least 3"),
        ({"participation": 0.25}, "hides a client among others"),
        ({"secagg-bits": 16}, "use 32 or 64"),
        ({"secagg-bits": 32}, "set secagg_bound"),
        ({"sampler": "poisson"}, "equally many clients"),
        ({"norm-bound": 2.0, "secagg-bound": 3.0}, "give one of them"),
        ({"secagg": False, "secagg-threshold": 2}, "add secagg = true"),
        ({"secagg": False, "secagg-bound": 2.0}, "add secagg = true"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(given, why):
    with pytest.raises(ValueError, match=why) as caught:
        read({"names": "a,b,c,d", "run-folder": "x", "secagg": True} | given)
    assert "\n" not in str(caught.value)


def test_the_range_follows_norm_bound():
    config, _ = read({"names": "a,b,c,d", "run-folder": "x", "secagg": True, "norm-bound": 7.0})
    assert config.secagg_bound == 7.0


# a server that lies


class Liar:
    """Speaks to the clients of a federation as a server may; what they answer, or refuse, is for it to read."""

    def __init__(self, federation):
        self.grid, self.numbers = federation.grid, {name: i for i, name in enumerate(NAMES)}
        self.run = federation.coordinator.run_id

    def say(self, name, kind, ticket, content=(), **order):
        node = 101 + self.numbers[name]
        record = ConfigRecord({"ticket": ticket, "run": self.run, **order})
        message = Message(RecordDict({**dict(content), "secagg": record}), node, kind)
        message.metadata.__dict__["_message_id"] = "1"
        return self.grid.answer(name, message)

    def masked(self, ticket, names=NAMES, model=None):
        """The first three stages, as they should be, of a measurement; ticket as the server likes it."""
        keys = {n: self.say(n, "train.keys", ticket, sums=1).content["secagg"] for n in names}
        clients = [self.numbers[n] for n in names]
        lists = {"clients": clients, "mask": [k["mask"] for k in keys.values()]}
        lists["share"] = [k["share"] for k in keys.values()]
        boxes = {n: self.say(n, "train.shares", ticket, **lists).content["secagg"] for n in names}
        sealed = {n: dict(zip(b["clients"], b["data"], strict=True)) for n, b in boxes.items()}
        replies = {}
        for n in names:
            others = [m for m in names if m != n]
            letters = {"clients": [self.numbers[m] for m in others], "sum": 0}
            letters["sealed"] = [sealed[m][self.numbers[n]] for m in others]
            replies[n] = self.say(n, "evaluate", ticket, {"model": model}, **letters)
        return replies

    def unmask(self, name, ticket, survivors, lost=()):
        lists = {"survivors": [self.numbers[n] for n in survivors], "lost": [self.numbers[n] for n in lost], "sum": 0}
        return self.say(name, "train.unmask", ticket, **lists)


@pytest.fixture(params=[1.0, 0.5])
def liar(tmp_path, request):
    """With sampling the sums of measurements are of more clients than those of rounds."""
    federation = Federation(tmp_path, rounds=1, participation=request.param, **SECAGG)
    federation.start()
    liar = Liar(federation)
    liar.model = asked(federation, "evaluate").content["model"]
    return liar


def test_a_lying_server_does_not_get_both_kinds_of_shares(liar, monkeypatch):
    """It tells two clients that anna is lost and the others that she is not: neither list has enough answers."""
    secrets, create = [], masking.create_shares
    monkeypatch.setattr(
        masking, "create_shares", lambda secret, *sizes: secrets.append(secret) or create(secret, *sizes)
    )
    ticket = "00000007-aaaaaaaa"
    assert not any(reply.has_error() for reply in liar.masked(ticket, model=liar.model).values())
    told = {"seed": [], "key": []}
    for name, gone in (("anna", []), ("bert", []), ("cleo", ["anna"]), ("dora", ["anna"])):
        said = liar.unmask(name, ticket, [n for n in NAMES if n not in gone], gone).content["secagg"]
        told["key" if gone else "seed"].append(dict(zip(said["clients"], said["data"], strict=True))[0])
    assert [len(shares) for shares in told.values()] == [2, 2]
    assert not {combined(shares) for shares in told.values()} & set(secrets)


def combined(shares):
    try:
        return masking.combine_shares(shares)
    except (ValueError, IndexError):
        return None


@pytest.mark.parametrize("second", [["anna", "bert", "cleo"], list(NAMES)])
def test_a_second_unmasking_of_an_attempt_is_refused(liar, second):
    liar.masked("00000007-aaaaaaaa", model=liar.model)
    lost = [n for n in NAMES if n not in second]
    assert not liar.unmask("anna", "00000007-aaaaaaaa", NAMES).has_error()
    assert "not expected" in liar.unmask("anna", "00000007-aaaaaaaa", second, lost).error.reason


def test_a_second_unmasking_of_a_round_for_other_clients_is_refused(liar):
    """Another attempt at the same round, without dora: the difference of the sums would be what she sent."""
    for ticket in ("00000007-aaaaaaaa", "00000007-bbbbbbbb"):
        liar.masked(ticket, model=liar.model)
        assert not liar.unmask("anna", ticket, NAMES).has_error()  # a sum that got lost may be asked for again
    liar.masked("00000007-cccccccc", model=liar.model)
    refused = liar.unmask("anna", "00000007-cccccccc", NAMES[:3], NAMES[3:])
    assert "round 7 has been unmasked for the clients 0, 1, 2, 3; a sum over others" in refused.error.reason
    liar.masked("00000008-cccccccc", model=liar.model)
    assert not liar.unmask("anna", "00000008-cccccccc", NAMES[:3], NAMES[3:]).has_error()


def test_a_round_of_long_ago_is_not_unmasked(liar):
    for t in range(10, 18):
        liar.masked(f"{t:08d}-aaaaaaaa", model=liar.model)
        assert not liar.unmask("anna", f"{t:08d}-aaaaaaaa", NAMES).has_error()
    liar.masked("00000009-aaaaaaaa", model=liar.model)
    assert "long ago" in liar.unmask("anna", "00000009-aaaaaaaa", NAMES).error.reason


def test_fewer_clients_than_the_threshold_and_strangers_are_refused(tmp_path):
    federation = Federation(tmp_path, rounds=1, **SECAGG)
    federation.start()
    liar, ticket = Liar(federation), "00000007-aaaaaaaa"
    keys = {n: liar.say(n, "train.keys", ticket, sums=1).content["secagg"] for n in NAMES}

    def shares(numbers):
        lists = {"clients": numbers, "mask": [k["mask"] for k in keys.values()][: len(numbers)]}
        return liar.say(
            "anna", "train.shares", ticket, **lists, share=[k["share"] for k in keys.values()][: len(numbers)]
        )

    assert "2 clients take part in the sum, expected at least 3" in shares([0, 1]).error.reason
    assert "keys of client 9, of 4" in shares([0, 1, 9]).error.reason


def test_a_vector_of_another_round_than_the_sums_is_refused(tmp_path):
    federation = Federation(tmp_path, rounds=1, **SECAGG)
    federation.start()
    message = asked(federation, "train")
    message.content["round"]["t"] = 3
    assert "names one round in the clear, and another one" in federation.grid.answer("anna", message).error.reason


@given(st.integers(2, 30), st.integers(2, 30))
def test_of_two_lists_of_survivors_one_at_most_has_enough_answers(drawn, n):
    for least in range(drawn // 2 + 1, drawn + 1):
        rule = Threshold(least, Fraction(least, drawn), n)
        for holders in range(least, n + 1):
            found = rule.of(holders)
            assert 2 * found > holders
            assert found >= least
            if holders >= drawn:  # clients that hold shares can unmask, and as many may be lost, in proportion
                assert found <= holders
                assert found * drawn >= least * holders


class Killed(Exception):
    """In place of a signal."""


def killed_at(kind, t, name):
    """The server ends when it has asked, in round t, and the client has answered."""

    def fault(asked, message, answer):
        reply = answer()
        ticket = message.content["secagg"]["ticket"] if "secagg" in message.content else ""
        if asked == name and message.metadata.message_type == kind and ticket.startswith(f"{t:08d}"):
            raise Killed
        return [reply]

    return fault


@pytest.mark.parametrize("noise", [{}, {"dp_clip": 1.0, "dp_noise": 0.2, "dp_among": 3, "measure_stationarity": False}])
@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_is_killed_at_any_stage_goes_on_exactly(tmp_path, stage, noise, monkeypatch):
    """The clients have moved on in that attempt; what they computed in it does not count, and the noise is not drawn
    anew."""
    four_exchanges(stage, monkeypatch)
    if noise:
        pytest.importorskip("dp_accounting")
    federation = Federation(tmp_path, rounds=3, eval_every=3, **SECAGG, **noise)
    with pytest.raises(Killed):
        federation.start(fault=killed_at(STAGES[stage], 1, "cleo"))
    assert federation.start(resume=True)["took_part"] == dict.fromkeys(NAMES, 3)
    if noise:
        h = torch.stack([state.h for state in federation.client_states()])
        assert bool(torch.isfinite(h).all())
        sent = [json.loads(v) for v in (tmp_path / "states" / "sent" / "anna.jsonl").read_text().splitlines()]
        assert not [line for line in sent if "error" in line]
        return
    assert drift(federation) < 1e-12
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-12)


def test_a_round_whose_unmasking_has_begun_waits_for_the_same_clients(tmp_path):
    """The server is killed when it has asked for shares; dora is not there when it comes back, then she is."""

    fault = killed_at("train.unmask", 1, "cleo")
    federation = Federation(tmp_path, fault=fault, rounds=3, eval_every=3, deadline=0.5, min_clients=3, **SECAGG)
    with pytest.raises(Killed):
        federation.start()
    without = {101 + i: name for i, name in enumerate(NAMES[:3])}
    with pytest.raises(TimeoutError, match="round 1 failed 2 times"):
        federation.start(nodes=without, fault=lambda n, m, answer: [answer()], resume=True, attempts=2)
    closing = federation.start(fault=lambda n, m, answer: [answer()], resume=True)
    assert closing["took_part"] == dict.fromkeys(NAMES, 3)
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-12)


def test_marks_of_answers_are_kept_by_several_processes_at_once(tmp_path):
    """Each looks and clears up while the others do: one of all who ask the same gets it."""
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        assert list(pool.map(_mark, [tmp_path / "own"] * 4, range(4))) == [100] * 4
        assert sum(pool.map(_mark, [tmp_path / "same"] * 4, [0] * 4, [ANSWERED] * 4)) == ANSWERED
    assert len(list((tmp_path / "own").glob("*.masked"))) == ANSWERED


def _mark(folder, who, count=100):
    got = 0
    for t in range(count):
        try:
            Answers(folder).once(f"{t:08d}-{who:08x}", "masked")
        except ValueError:
            continue
        got += 1
    return got


def test_newton_sums_gradients_and_hessians_under_masks(tmp_path):
    given = {"algorithm": "fednewton", "rounds": 4, "eval_every": 4, "min_clients": 4, "local_steps": 1}
    federation = Federation(tmp_path, **given, **SECAGG)
    federation.start()
    assert error(federation) < 1e-10
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-12)


def test_a_method_that_cannot_is_refused_between_machines(tmp_path):
    with pytest.raises(ValueError, match="FedDR has no state_after_sending"):
        Federation(tmp_path, algorithm="feddr", **SECAGG).start()
