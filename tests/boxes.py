"""Every method as its algorithm box: plain loops over clients and steps, everybody present.

Nothing here is shared with the package. g(i, t, q, x) is client i's gradient at x in step q of round t, P(v, w) the
prox of w phi; each function yields the model after every round.
"""

import numpy as np
import torch


def mean(vectors):
    return sum(vectors) / len(vectors)


def soft(weight):
    """The prox of weight |x|_1, by cases."""

    def P(v, w):
        w = w * weight
        return torch.where(v > w, v - w, torch.where(v < -w, v + w, torch.zeros_like(v)))

    return P


def fednmap(g, n, z, T, P, *, a, s, Q, gamma):
    """The paper's Algorithm 1, with its states c_i and y_i."""
    c = [torch.zeros_like(z) for _ in range(n)]
    y = c
    for t in range(T):
        if t > 0:
            c = [c[i] - y[i] + mean(y) for i in range(n)]
        x, y = P(z, gamma), []
        for i in range(n):
            z_i = z
            for q in range(Q):
                x_i = P(z_i, gamma)
                z_i = z_i - a * (g(i, t, q, x_i) + (z - x) / gamma + c[i])
            y.append((z - z_i) / (a * Q))
        z = z - Q * s * a * mean(y)
        yield P(z, gamma)


def zhang(g, n, x, T, P, *, a, s, Q):
    c, te = [torch.zeros_like(x) for _ in range(n)], a * s * Q
    for t in range(T):
        ends, G = [], []
        for i in range(n):
            zhat, x_i, gradients = x, x, []
            for q in range(Q):
                gradients.append(g(i, t, q, x_i))
                zhat = zhat - a * (gradients[-1] + c[i])
                x_i = P(zhat, (q + 1) * a)
            ends.append(zhat)
            G.append(mean(gradients))
        z = x + s * (mean(ends) - x)
        c = [(x - z) / te - G[i] for i in range(n)]
        x = P(z, te)
        yield x


def fedcanon(g, n, x, T, P, *, a, Q, alpha):
    c = [torch.zeros_like(x) for _ in range(n)]
    for t in range(T):
        h = []
        for i in range(n):
            z = x
            for q in range(Q):
                z = z - a * (g(i, t, q, z) + c[i])
            h.append((x - z) / (a * Q) - c[i])
        x = P(x - alpha * mean(h), alpha)
        c = [mean(h) - h[i] for i in range(n)]
        yield x


def fedda(g, n, z, T, P, *, a, s, Q):
    te = a * s * Q
    for t in range(T):
        changes = []
        for i in range(n):
            z_i = z
            for q in range(Q):
                z_i = z_i - a * g(i, t, q, P(z_i, te * t + a * q))
            changes.append(z_i - z)
        z = z + s * mean(changes)
        yield P(z, te * (t + 1))


def fedmid(g, n, w, T, P, *, a, s, Q, server_only):
    for t in range(T):
        changes = []
        for i in range(n):
            w_i = w
            for q in range(Q):
                w_i = w_i - a * g(i, t, q, w_i)
                w_i = w_i if server_only else P(w_i, a)
            changes.append(w_i - w)
        w = P(w + s * mean(changes), a * s * Q)
        yield w


def fast_fedda(g, n, w_0, T, P, *, Q, mu, gamma, released=False):
    """released: as in the official code, where W holds one iterate too many per round."""

    def step(G, W, A):
        b = mu / 2 + gamma / A
        return P(-(G - mu / 2 * W - gamma * w_0) / A / b, 1 / b)

    G, W, A, w = torch.zeros_like(w_0), torch.zeros_like(w_0), 0, w_0
    for t in range(T):
        sums = []
        for i in range(n):
            G_i, W_i, w_i = G, W, w
            for q in range(Q):
                G_i, W_i = G_i + g(i, t, q, w_i), W_i + w_i
                w_i = step(G_i, W_i, A + q + 1)
            sums.append((G_i, W_i + w_i if released else W_i))
        G, W, A = mean([u for u, _ in sums]), mean([v for _, v in sums]), A + Q
        w = step(G, W, A)
        yield w


def top(v, K):
    """The K largest entries of v."""
    kept = torch.zeros_like(v)
    for j in sorted(range(len(v)), key=lambda j: -abs(float(v[j])))[:K]:
        kept[j] = v[j]
    return kept


def compressed_fednmap(g, n, z, T, P, *, a, s, Q, gamma, K):
    """FedNMap's correction and step, with what Top-K lets through of the clients' mean gradients G_i."""
    delta = K / len(z)
    eta = 0.0 if len(z) == K else delta / (3 * (1 - delta) ** 0.5 * (1 + (1 - delta) ** 0.5))
    h_i, e = [torch.zeros_like(z)] * n, [torch.zeros_like(z)] * n
    for t in range(T):
        x, h, D = P(z, gamma), mean(h_i), []
        for i in range(n):
            z_i, gradients = z, []
            for q in range(Q):
                gradients.append(g(i, t, q, P(z_i, gamma)))
                z_i = z_i - a * (gradients[-1] + (z - x) / gamma + h - h_i[i])
            G = mean(gradients)
            D.append(top(G - h_i[i] - eta * e[i], K))
            e[i] = e[i] + h_i[i] + D[i] - G
        h_i = [h_i[i] + D[i] for i in range(n)]
        z = z - Q * s * a * ((z - x) / gamma + mean(h_i))
        yield P(z, gamma)


def econtrolda(g, n, x_0, T, P, *, K, gamma):
    """Top-K; one gradient per round."""

    def C(v):
        return top(v, K)

    delta = K / len(x_0)
    eta = 0.0 if len(x_0) == K else delta / (3 * (1 - delta) ** 0.5 * (1 + (1 - delta) ** 0.5))
    e = [torch.zeros_like(x_0) for _ in range(n)]
    ghat_i = [torch.zeros_like(x_0) for _ in range(n)]
    ghat, S, x = torch.zeros_like(x_0), torch.zeros_like(x_0), x_0
    for t in range(T):
        D = []
        for i in range(n):
            gradient = g(i, t, 0, x)
            D.append(C(gradient - ghat_i[i] - eta * e[i]))
            ghat_i[i] = ghat_i[i] + D[i]
            e[i] = e[i] + ghat_i[i] - gradient
        ghat = ghat + mean(D)
        S = S + ghat
        x = P(x_0 - S / gamma, (t + 1) / gamma)
        yield x


def feddr(g, n, start, T, P, *, a, Q, r, alpha):
    x, y, xbar = [start] * n, [start] * n, start
    for t in range(T):
        for i in range(n):
            y[i] = y[i] + alpha * (xbar - x[i])
            for q in range(Q):
                x[i] = x[i] - a * (g(i, t, q, x[i]) + (x[i] - y[i]) / r)
        xbar = P(mean([2 * x[i] - y[i] for i in range(n)]), r)
        yield xbar


def fedadmm(g, n, start, T, P, *, a, Q, beta):
    x, lam, xbar = [start] * n, [torch.zeros_like(start)] * n, start
    for t in range(T):
        for i in range(n):
            for q in range(Q):
                x[i] = x[i] - a * (g(i, t, q, x[i]) + lam[i] + beta * (x[i] - xbar))
            lam[i] = lam[i] + beta * (x[i] - xbar)
        xbar = P(mean([x[i] + lam[i] / beta for i in range(n)]), 1 / beta)
        yield xbar


def scaffold(g, n, x, T, *, a, s, Q):
    """Option II."""
    c, c_i = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(n)]
    for t in range(T):
        ends, new = [], []
        for i in range(n):
            y = x
            for q in range(Q):
                y = y - a * (g(i, t, q, y) - c_i[i] + c)
            new.append(c_i[i] - c + (x - y) / (a * Q))
            ends.append(y)
        x = x + s * mean([y - x for y in ends])
        c = c + mean([new[i] - c_i[i] for i in range(n)])
        c_i = new
        yield x


def fedprox(g, n, x, T, *, a, s, Q, mu):
    """FedAvg where mu = 0."""
    for t in range(T):
        ends = []
        for i in range(n):
            y = x
            for q in range(Q):
                y = y - a * (g(i, t, q, y) + mu * (y - x))
            ends.append(y)
        x = x + s * (mean(ends) - x)
        yield x


def fedavgm(g, n, x, T, *, a, s, Q, mu, beta):
    """torch.optim.SGD on the server, fed with what FedProx's clients changed."""
    x = x.clone().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=s, momentum=beta)
    for t in range(T):
        start = x.detach().clone()
        (after,) = fedprox(lambda i, _, q, y, t=t: g(i, t, q, y), n, start, 1, a=a, s=1.0, Q=Q, mu=mu)
        x.grad = start - after
        optimizer.step()
        yield x.detach().clone()


class Algorithm2:
    """The server of Algorithm 2 of Reddi et al., lines 11 to 15, coordinate by coordinate."""

    def __init__(self, kind, p, *, eta, beta1, beta2, tau):
        self.kind, self.eta, self.beta1, self.beta2, self.tau = kind, eta, beta1, beta2, tau
        self.m, self.v = [0.0] * p, [tau**2] * p

    def __call__(self, x, d):
        new = []
        for j, (old, d_j) in enumerate(zip(x.tolist(), d.tolist(), strict=True)):
            self.m[j] = self.beta1 * self.m[j] + (1 - self.beta1) * d_j
            v, square = self.v[j], d_j * d_j
            if self.kind == "adagrad":
                self.v[j] = v + square
            elif self.kind == "adam":
                self.v[j] = self.beta2 * v + (1 - self.beta2) * square
            else:
                self.v[j] = v - (1 - self.beta2) * square * ((v > square) - (v < square))
            new.append(old + self.eta * self.m[j] / (self.v[j] ** 0.5 + self.tau))
        return torch.tensor(new, dtype=x.dtype)


def fedopt(g, n, x, T, *, kind, a, Q, mu=0.0, **numbers):
    """Algorithm 2 of Reddi et al., with FedProx's clients where mu > 0."""
    optimiser = Algorithm2(kind, len(x), **numbers)
    for t in range(T):
        (after,) = fedprox(lambda i, _, q, y, t=t: g(i, t, q, y), n, x, 1, a=a, s=1.0, Q=Q, mu=mu)
        x = optimiser(x, after - x)
        yield x


def fedpd(g, n, start, T, *, a, Q, r, before=False):
    """before: as in the official Matlab code, which sends the lambda_i from before the round."""
    x, lam, x_0 = [start] * n, [torch.zeros_like(start)] * n, start
    for t in range(T):
        old = list(lam)
        for i in range(n):
            for q in range(Q):
                x[i] = x[i] - a * (g(i, t, q, x[i]) + lam[i] + (x[i] - x_0) / r)
            lam[i] = lam[i] + (x[i] - x_0) / r
        x_0 = mean([x[i] + r * (old if before else lam)[i] for i in range(n)])
        yield x_0


def scaffnew(g, n, start, T, *, a, Q, seed):
    """Steps until the shared coin, of probability p = 1/Q, says to communicate; a(t) is the step of round t."""
    p = 1 / Q
    x, h = [start] * n, [torch.zeros_like(start)] * n
    for t in range(T):
        steps = np.random.default_rng([seed, t]).geometric(p)
        for q in range(steps):
            x = [x[i] - a(t) * (g(i, t, q, x[i]) - h[i]) for i in range(n)]
        xbar = mean(x)
        h = [h[i] + (p / a(t)) * (xbar - x[i]) for i in range(n)]
        x = [xbar] * n
        yield xbar


def prox_sgd(g, x, T, P, *, a, Q):
    """g(t, q, x): the gradient of all data."""
    for t in range(T):
        for q in range(Q):
            x = P(x - a * g(t, q, x), a)
        yield x


def normal_map_sgd(g, z, T, P, *, a, Q, gamma):
    for t in range(T):
        for q in range(Q):
            x = P(z, gamma)
            z = z - a * (g(t, q, x) + (z - x) / gamma)
        yield P(z, gamma)
