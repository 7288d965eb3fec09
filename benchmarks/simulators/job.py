"""The job that every simulator runs, in numpy alone: FedAvg, 784-64-10, 600 samples per client, 10 steps, batch 32."""

import itertools
import json
import sys
import time

import numpy as np

CLIENTS = 50
ROUNDS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 8  # a worker of Ray has other arguments
INPUTS, HIDDEN, CLASSES, SAMPLES, STEPS, BATCH, RATE = 784, 64, 10, 600, 10, 32, 0.1


def client(i):
    rng = np.random.default_rng([0, i])
    return rng.random((SAMPLES, INPUTS), dtype=np.float32), rng.integers(0, CLASSES, SAMPLES)


def batches(i, t):
    """Rows of the minibatches of client i in round t, one line per step."""
    return np.random.default_rng([1, i, t]).permutation(SAMPLES)[: STEPS * BATCH].reshape(STEPS, BATCH)


def report(one_round):
    """Wall and processor seconds of each round after the first two, as JSON."""
    marks = [now()]
    for t in range(ROUNDS + 2):
        one_round(t)
        marks.append(now())
    print_rounds(marks)


def now():
    return time.perf_counter(), time.process_time()


def print_rounds(marks):
    rounds = itertools.pairwise(marks[2:])
    print(json.dumps([[b - a for a, b in zip(before, after, strict=True)] for before, after in rounds]))
