"""Sparse tables: the same numbers as the dense ones, wherever they go, and never made dense on the way."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array, csr_matrix, random_array
from torch.nn.functional import cross_entropy

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.data import ClientData, load, partition
from fednmap.data.sparse import deviations, is_sparse, joined, take, to_scipy
from fednmap.models import mlp
from fednmap.problems import GLM, Logistic, Network, glm
from fednmap.problems.families import FAMILIES
from fednmap.regularizers import L1

SIZES = (7, 25, 11)
TARGETS = {"logistic": 2, "multinomial": 3, "ordinal": 3, "binomial": 2}


def tables(seed=0):
    rng = np.random.default_rng(seed)
    made = [random_array((m, 20), density=0.15, rng=rng, format="csr") for m in SIZES]
    made[0].data[made[0].indptr[2] : made[0].indptr[3]] = 0
    made[0].eliminate_zeros()  # a row without entries
    return made


def targets(kind):
    rng = np.random.default_rng(5)
    if kind in TARGETS:
        return [rng.integers(0, TARGETS[kind], m) for m in SIZES]
    return [rng.poisson(1.0, m).astype(float) + (kind == "gamma") for m in SIZES]


def both(kind, **options):
    sparse = GLM(list(zip(tables(), targets(kind), strict=True)), kind, intercept=True, **options)
    dense = GLM(
        [(a.toarray(), y) for a, y in zip(tables(), targets(kind), strict=True)], kind, intercept=True, **options
    )
    assert is_sparse(sparse.data.x)
    return sparse, dense


def dense(table):
    """Written out by hand."""
    out = np.zeros(table.shape, table.dtype)
    for i, (first, last) in enumerate(pairwise(table.indptr)):
        out[i, table.indices[first:last]] = table.data[first:last]
    return out


def same(values, expected):
    return torch.equal(torch.from_numpy(dense(to_scipy(values))), expected)


@pytest.fixture
def never_dense(monkeypatch):
    def refuse(*_):
        raise AssertionError("made dense")

    monkeypatch.setattr(torch.Tensor, "to_dense", refuse)
    monkeypatch.setattr("scipy.sparse._compressed._cs_matrix.toarray", refuse)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_losses_and_gradients_are_those_of_the_dense_table(kind, batch_size, small, monkeypatch):
    monkeypatch.setattr(glm, "SMALL_BYTES", small)  # clients one by one; or side by side
    sparse, dense = both(kind, batch_size=batch_size)
    rng = torch.Generator().manual_seed(0)
    points = dense.start + 0.2 * torch.rand(3, dense.dim, generator=rng, dtype=torch.float64)
    x, ids = points[0], torch.tensor([1, 0, 2])
    for f in (
        lambda p: p.loss(x),
        lambda p: p.gradient(x),
        lambda p: p.value_and_gradient(x)[1],
        lambda p: p.hessian(x),
        lambda p: p.oracle(ids, 3)(points, 2),
        lambda p: p.oracle(ids, 3)(x, 2),
        lambda p: p.oracle(ids[:1], 3)(x, 2),
        lambda p: p.oracle(torch.tensor(2), 3)(x, 2),
        lambda p: p.alone(2).oracle(torch.tensor([0]), 3)(x, 2),
        lambda p: p.mean(x, p.data.x),
        lambda p: torch.tensor(p.smoothness(x), dtype=torch.float64),
    ):
        got, expected = f(sparse), f(dense)
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-13)
    assert torch.allclose(sparse.predict(x, sparse.data.x), dense.predict(x, dense.data.x))


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trajectories_are_those_of_the_dense_table(batch_size, dtype, never_dense):
    pairs = list(zip(tables(), targets("logistic"), strict=True))
    data = ClientData.of(pairs)
    narrow = ClientData(data.x.to(dtype), data.y, data.sizes)
    method = FedNMap(L1(0.01), eta_a=0.5, Q=3)
    written = [(torch.from_numpy(dense(a)).to(dtype), y) for a, y in pairs]

    def end(data, **options):
        problem = Logistic(data, batch_size=batch_size)
        assert problem.start.dtype == dtype
        return list(simulate(method, problem, rounds=20, participation=0.7, **options))[-1].server.z

    expected, tolerance = end(written), 1e-5 if dtype == torch.float32 else 1e-12
    assert torch.allclose(end(narrow), expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(end(narrow, chunk=1), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(end(narrow), end(narrow))


def test_rows_are_taken_joined_and_divided_as_those_of_a_dense_table(never_dense):
    each = tables()
    data = ClientData.of([(a, np.zeros(len(y))) for a, y in zip(each, targets("logistic"), strict=True)])

    whole = torch.from_numpy(np.concatenate([dense(a) for a in each]))
    assert same(data.x, whole)
    assert data.x.col_indices().dtype == torch.int32
    assert same(joined([a for a, _ in data]), whole)
    order = torch.tensor([5, 2, 2, 40])
    for rows in (order, slice(3, 9), slice(9, 9), torch.arange(43) % 5 == 4):
        assert same(take(data.x, rows), whole[rows])
    y = torch.arange(43) % 4
    parts = partition("sorted", y, 5)
    split = ClientData.split(data.x, y, parts)
    assert same(split.x, whole[torch.cat(parts)])
    assert same(split[3][0], whole[parts[3]])
    assert same(split.mixed(1).x, ClientData.split(whole, y, parts).mixed(1).x)
    assert torch.allclose(deviations(data.x), whole.std(0, correction=0), rtol=1e-12)
    changed = each[2].copy()
    changed.data[0] += 1
    others = [*each[:2], changed]
    again = [ClientData.of([(a, np.zeros(a.shape[0])) for a in tables]) for tables in (each, others)]
    assert again[0].digest == data.digest != again[1].digest


def test_any_format_of_scipy_is_taken():
    rows, cols = [0, 0, 1, 0], [1, 1, 0, 2]
    doubled = coo_array(([1.0, 2.0, 5.0, 7.0], (rows, cols)), shape=(2, 3))  # an entry in two parts
    expected = [[0.0, 3.0, 7.0], [5.0, 0.0, 0.0]]
    for values in (doubled, csr_matrix(doubled.toarray()), csr_matrix(np.array(expected).astype(int))):
        assert ClientData.of([(values, [0, 1])]).x.to_dense().tolist() == expected


def test_files_stay_sparse(tmp_path):
    file = tmp_path / "train"
    file.write_text("".join(f"{(-1) ** i} {i % 7 + 1}:0.5 {i % 11 + 8}:2\n" for i in range(40)))
    data, dense = load(f"svm:{file}"), load(f"svm:{file},dense=true")
    assert is_sparse(data.x_train)
    assert is_sparse(data.x_test)
    assert not is_sparse(dense.x_train)
    assert torch.equal(data.x_train.to_dense(), dense.x_train)
    assert torch.equal(data.x_test.to_dense(), dense.x_test)
    assert data.x_train.dtype == torch.float32
    assert len(data.digest) == 64


def test_what_needs_a_dense_table_says_so():
    a, y = tables()[1], targets("logistic")[1]
    with pytest.raises(ValueError, match="networks compute on dense tables"):
        Network(mlp(20, 2), cross_entropy, [(a, y)])
    with pytest.raises(ValueError, match="some clients' x are sparse and some dense"):
        Logistic([(a, y), (a.toarray(), y)])
    with pytest.raises(ValueError, match="one pair"):
        Logistic(a)
    bad = a.copy()
    bad.data[-1] = np.nan
    row = int(np.searchsorted(bad.indptr, bad.nnz - 1, side="right")) - 1
    with pytest.raises(ValueError, match=rf"first in row {row}\b"):
        Logistic([(bad, y)])
