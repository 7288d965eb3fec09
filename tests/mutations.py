"""Does a mistake in a method get noticed? Run by hand: `python tests/mutations.py [method ...] [--turn K]`.

Each line of MUTATIONS damages one method in a temporary copy of the package, by one flipped sign or one dropped term,
and runs the quick tests that name the method. Printed: method, damage, the first test that failed. A damage that
survives means that a test is missing; the exit code is then 1. `--turn K` tries every third damage only, from K % 3 on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TESTS = [  # those first that notice most, and soon
    f"tests/{name}.py"
    for name in (
        *(f"algorithms/test_{n}" for n in ("parities", "golden", "compression", "server_optimisers", "fednewton")),
        *("algorithms/test_memory", "algorithms/test_methods", "simulation/test_simulate"),
        *("decentralized/test_decentralized", "privacy/test_privacy"),
    )
]
ROOMS = ("algorithms", "decentralized", "privacy", "simulation")
NAMED = {
    "quasi_newton": "memory",
    "server_optimiser": "server_optimiser or fedavgm",
    "control_variates": "fednmap or zhang or fedcanon",
    "fedavg": "fedavg or fedprox",
    "fedda": "fedda or fedmid or fast_fedda",
    "compressed": "compressed_fednmap or econtrolda",
    "splitting": "feddr or fedadmm or fedpd",
    "central": "prox_sgd or proxsgd or normal_map_sgd or normalmapsgd",
    "methods": "decentralized",
}
"""What tests call a file whose name they do not have."""

# method (a file of fednmap/algorithms, decentralized or privacy), what is damaged, the line before, the line after
MUTATIONS = [
    ("fednmap", "sign of the correction", "keep * down.h, client.h,", "keep * client.h, down.h,"),
    ("fednmap", "no correction", "keep = 1 - self.forget", "keep = 0.0"),
    ("fednmap", "no pull (z - x)/gamma", "self._pull(down.z) + keep", "keep"),
    ("control_variates", "state from what was computed", "sent.y - self.direction", "up.y - self.direction"),
    ("fednmap", "h_i keeps the pull", "self.Client(y - d)", "self.Client(y - (down.h - client.h))"),
    ("fednmap", "server's h keeps the pull", "(up.y - self._pull(z) - h)", "(up.y - h)"),
    ("fednmap", "share ignored", "h + share * (", "h + ("),
    (
        "fednmap",
        "sign of the local step",
        "step.down(z_i, self._prox(z_i), q, d)",
        "2 * z_i - step.down(z_i, self._prox(z_i), q, d)",
    ),
    ("fednmap", "no d in the local step", "q, d)", "q)"),
    ("fednmap", "no local prox", "down(z_i, self._prox(z_i), q", "down(z_i, z_i, q"),
    ("quasi_newton", "sign of the low rank part", "self.sigma * v - self.W", "self.sigma * v + self.W"),
    ("quasi_newton", "pull without gamma", "u + gamma / step * (v - u)", "u + (v - u) / step"),
    ("quasi_newton", "psi is not watched", "rise <= rounding and ", ""),
    ("quasi_newton", "secants without the newest", "past.S[1:], s[None]", "past.S[1:], past.S[-1:]"),
    ("quasi_newton", "no stages of plain rounds", "or known.bent == BENT", ""),
    ("quasi_newton", "plain step of a stage uphill", "z - known.pace * eta_hat * y", "z + known.pace * eta_hat * y"),
    ("compressed", "no correction", "FedNMap.Server(down.z, down.h)", "FedNMap.Server(down.z, h)"),
    ("compressed", "sign of the error", "e + h - G)", "e - h + G)"),
    ("compressed", "no error control", "G - h - eta * e", "G - h"),
    ("compressed", "all of the error at once", "G - h - eta * e", "G - h - e"),
    ("compressed", "h_i from what was not sent", "h = h + D\n", "h = G\n"),
    ("compressed", "compresses the gradient", "compress(G - h - ", "compress(G - "),
    ("compressed", "share ignored", "h + share * up.D", "h + up.D"),
    ("compressed", "server forgets h", "(pull + h + up.D)", "(pull + up.D)"),
    ("compressed", "no pull on the server", "(pull + h + up.D)", "(h + up.D)"),
    ("compressed", "always a whole step", "pace * self.Q", "self.Q"),
    ("fednewton", "never taken back", "if server.rounds and is_worse(", "if False and is_worse("),
    ("fednewton", "no damping after that", "(10 * mu).clamp(DAMPED * self._mean(H), MOST * self._mean(H))", "mu"),
    ("fednewton", "the wrong half alone", "full[row, column] = full[column, row] = H", "full[column, row] = H"),
    ("fednewton", "gradient at z", "g(x, 0)", "g(down.z, 0)"),
    ("server_optimiser", "no momentum", "return y + self.beta * m, ", "return y, "),
    ("server_optimiser", "momentum damped", "self.beta * m + (y - x)", "self.beta * m + (1 - self.beta) * (y - x)"),
    ("server_optimiser", "momentum without an end", "self.beta * m + (y - x)", "m + (y - x)"),
    ("server_optimiser", "v begins at 0", "torch.full_like(x, self.tau**2)", "torch.zeros_like(x)"),
    ("server_optimiser", "tau under the root", "(v.sqrt() + self.tau)", "(v + self.tau).sqrt()"),
    ("server_optimiser", "sign of Yogi", "torch.sign(v - square)", "torch.sign(square - v)"),
    ("server_optimiser", "Adam sums up", "self.beta2 * v + (1 - self.beta2) * square", "v + (1 - self.beta2) * square"),
    ("server_optimiser", "Adagrad forgets", "return v + square", "return self.beta2 * v + square"),
    ("server_optimiser", "no mean of the changes", "(1 - self.beta1) * d", "d"),
    ("server_optimiser", "from the method's own point", "return x + self.eta * m", "return y + self.eta * m"),
    ("server_optimiser", "corrections stand still", "*after._replace(**{name: x})", "*before._replace(**{name: x})"),
    (
        "server_optimiser",
        "nothing learnt",
        "getattr(before, name), getattr(after, name)",
        "*2 * (getattr(after, name),)",
    ),
    ("server_optimiser", "clients follow", "broadcast_follows=False", "up=of.traits.up"),
    ("server_optimiser", "what is given is lost", "of = replace(self.of, **given)", "pass"),
    ("control_variates", "sign of the correction", "(down.h - client.h)", "(client.h - down.h)"),
    ("zhang", "no correction", "q * self.eta_a), q, c)", "q * self.eta_a), q)"),
    ("zhang", "prox weight does not grow", "q * self.eta_a), q, c)", "self.eta_a), q, c)"),
    ("zhang", "share ignored", "h + share * (up.y - h)", "up.y"),
    ("fedcanon", "no correction", "q, c)", "q)"),
    ("fedcanon", "share ignored", "h + share * (up.y - h)", "up.y"),
    ("fedda", "sign of the server step", "server.z + self.eta_s", "server.z - self.eta_s"),
    ("fedda", "no growth of the local prox", "down.s + self.eta_a * q", "down.s"),
    ("fedda", "sum of the steps stands still", "server.s + self.eta_s * self.eta_a * self.Q", "server.s"),
    ("fedda", "sign of the server step", "server.w + self.eta_s", "server.w - self.eta_s"),
    ("fedda", "no server prox", "self.Server(self.phi.prox(w, self.eta_s * self.eta_a * self.Q))", "self.Server(w)"),
    ("fedda", "no local prox", "if not self.server_only", "if False"),
    ("fedda", "sign of W", "(self.mu / 2 * W - G) / b", "(-self.mu / 2 * W - G) / b"),
    ("fedda", "iterates not summed", "W + w, A + 1", "W, A + 1"),
    ("fedda", "start forgotten", "-self.gamma * start", "0 * start"),
    ("compressed", "sign of the error", "e + ghat - gradient", "e - ghat + gradient"),
    ("compressed", "no error control", "gradient - ghat - compress.control(e.shape[-1]) * e", "gradient - ghat"),
    ("compressed", "no memory of the gradient", "gradient - ghat - compress", "gradient - compress"),
    ("splitting", "sign of the relaxation", "client.y + self.alpha", "client.y - self.alpha"),
    ("splitting", "no relaxation", "self.alpha * (down.xbar - client.x)", "(down.xbar - client.x)"),
    ("splitting", "no pull to y", "q, (x - y) / self.r)", "q)"),
    ("splitting", "share ignored", "share * up.change", "up.change"),
    ("splitting", "sign of the multiplier", "lam = lam + self.beta", "lam = lam - self.beta"),
    ("splitting", "no multiplier", "q, lam + self.beta", "q, self.beta"),
    ("splitting", "no penalty", "q, lam + self.beta * (x - down.xbar))", "q, lam)"),
    ("splitting", "share ignored", "share * up.change", "up.change"),
    ("scaffold", "state from what was computed", "client.c + sent.control", "client.c + up.control"),
    ("scaffold", "sign of the correction", "down.c - client.c", "client.c - down.c"),
    ("scaffold", "no correction", "q, d)", "q)"),
    ("scaffold", "c_i keeps c", "self.local_decay)) - d", "self.local_decay))"),
    ("scaffold", "share ignored", "share * up.control", "up.control"),
    ("fedavg", "sign of the local step", "step.down(y, y, q)", "2 * y - step.down(y, y, q)"),
    ("fedavg", "no server step size", "self.eta_s * up.change", "up.change"),
    ("scaffold", "sends what it should forget", "alpha=1 - self.forget", "alpha=1"),
    ("scaffold", "state that forgets nothing", "(1 - self.forget) * client.c + sent", "client.c + sent"),
    ("scaffold", "server that forgets nothing", "(1 - share * self.forget) * server.c", "server.c"),
    ("client_level", "no clip", "scale = (clip / norm.clamp_min(clip))", "scale = torch.ones_like(norm)"),
    ("client_level", "vectors clipped one by one", "for v in fields]).sum(0)", "for v in fields]).amax(0)"),
    (
        "client_level",
        "state from what was not clipped",
        "uplinks._replace(sent=sent, known=sent)",
        "uplinks._replace(sent=sent)",
    ),
    ("client_level", "noise in the state", "sent=noised, known=sent", "sent=noised, known=noised"),
    ("uplink", "state from what was not sent", "if done.known is not up:", "if False:"),
    (
        "client_level",
        "noise for the mean weight",
        "deviation = self.noise_multiplier * self.clip * largest_weight(federation)",
        "deviation = self.noise_multiplier * self.clip",
    ),
    (
        "client_level",
        "shares for the mean weight",
        "clip, among, seed = self.clip * largest_weight(federation)",
        "clip, among, seed = self.clip",
    ),
    ("client_level", "divided by who came", "v / (share * federation.total)", "v / received.weight"),
    (
        "client_level",
        "share of who came",
        "for v in parts], share)",
        "for v in parts], received.weight / federation.n)",
    ),
    ("client_level", "no noise", "v + gaussian(v, deviation,", "v + 0 * gaussian(v, deviation,"),
    ("client_level", "the same noise in all rounds", "SERVER, received.t, k)", "SERVER, 0, k)"),
    ("client_level", "one noise for two vectors", "SERVER, received.t, k)", "SERVER, received.t, 0)"),
    ("client_level", "one noise for all clients", "uplinks.t, i, field", "uplinks.t, 0, field"),
    ("client_level", "one share for two vectors", "uplinks.t, i, field", "uplinks.t, i, 0"),
    ("client_level", "too few shares will do", "len(ids) >= self.among", "True"),
    (
        "client_level",
        "rounds with nobody are left out",
        "return self.among is None or",
        "return weight > 0 if self.among is None else",
    ),
    ("client_level", "nothing is forgotten", "with_fields(algorithm, forget=self.forget) if self.forget else ", ""),
    ("client_level", "sampling counted twice", "coin(federation) if self", "coin(federation) ** 2 if self"),
    (
        "client_level",
        "sampling hides from who draws",
        "coin(federation) if self.among is None else 1.0",
        "coin(federation)",
    ),
    ("client_level", "noise rounded away", "noise < FINE * rounding.step", "noise < 0 * rounding.step"),
    ("client_level", "shares too small", "clip / among**0.5", "clip / among"),
    ("client_level", "shares too large", "clip / among**0.5", "clip / among**0.25"),
    ("fedavg", "sign of the pull", "self.mu * (y - down.x)", "-self.mu * (y - down.x)"),
    ("fedavg", "no pull", ", self.mu * (y - down.x)", ""),
    ("splitting", "sign of the multiplier", "lam = lam + (x", "lam = lam - (x"),
    ("splitting", "FedPD: no multiplier", "q, lam + (x", "q, (x"),
    ("splitting", "no penalty", "q, lam + (x - down.x) / self.r)", "q, lam)"),
    ("scaffnew", "sign of the control", "client.h + (down.x", "client.h - (down.x"),
    ("scaffnew", "no control", "q, -h)", "q)"),
    ("scaffnew", "p forgotten", "(self.Q * down.eta_a)", "down.eta_a"),
    ("scaffnew", "step of another round", "(self.Q * down.eta_a)", "(self.Q * self.eta_a)"),
    ("central", "sign of the step", "step.down(x, x, q)", "2 * x - step.down(x, x, q)"),
    ("central", "no prox", "self.phi.prox(step.down(x, x, q), self.eta_a)", "step.down(x, x, q)"),
    ("central", "sign of the pull", "q, (z - x)", "q, (x - z)"),
    ("central", "no pull", "q, (z - x) / self.gamma)", "q)"),
    ("methods", "sign of the pull", "(state.z - x) / self.gamma", "(x - state.z) / self.gamma"),
    ("methods", "no tracking", "y = state.y + G - state.G", "y = G"),
    ("methods", "sign of the step", "state.z - self.eta_a * y", "state.z + self.eta_a * y"),
    ("methods", "own gradient in place of y", "self.eta_a * y, y)", "self.eta_a * G, y)"),
    ("methods", "gradient not remembered", "mixed.y, kept.G)", "mixed.y, 0 * kept.G)"),
    ("methods", "sign of the pull", "(z - x) / self.gamma", "(x - z) / self.gamma"),
    ("methods", "no correction", "self.Message(z + s - state.s)", "self.Message(s)"),
    ("methods", "sign of the correction", "z + s - state.s", "z - s + state.s"),
    ("methods", "W with negative eigenvalues", "positive=True", "positive=False"),
    ("methods", "sign of the step", "state.x - self.eta_a", "state.x + self.eta_a"),
    ("methods", "no prox", "self.phi.prox(mixed.v, self.eta_a)", "mixed.v"),
    ("methods", "no correction", "mixed.x + kept.u - kept.step", "mixed.x - kept.step"),
    ("methods", "sign of the correction", "kept.u + (mixed.x - kept.x)", "kept.u - (mixed.x - kept.x)"),
    ("methods", "correction twice as fast", "(mixed.x - kept.x) / 2", "(mixed.x - kept.x)"),
    ("methods", "no prox", "self.phi.prox(v, self.eta_a)", "v"),
]


def first_failure(copy: Path, method: str) -> str | None:
    """The first of the method's tests that fails in this copy, None where all pass."""
    name = f"{method} or {method.replace('_', '')}"  # -k ignores case: fast_fedda, and test_contract[FastFedDA]
    log = copy / "log"
    process = os.fork()  # torch is imported already: importing it anew would take longer than the tests
    if process == 0:
        code = 3
        try:
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            with log.open("w") as out:
                sys.stdout = sys.stderr = out
                code = pytest.main(["-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow", "-k", name, *TESTS])
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+(?: [^-]\S*)*)", log.read_text(), re.MULTILINE)
    if not found and code:
        raise RuntimeError(f"pytest did not run:\n{log.read_text()}")
    return found[1] if found else None


def main(methods: list[str], turn: int | None = None) -> int:
    survived = 0
    chosen = [m for m in MUTATIONS if not methods or m[0] in methods]
    if turn is not None:
        chosen = chosen[turn % 3 :: 3]
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # files change within a second: stale bytecode would be taken for fresh
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for part in ("fednmap", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for method, damage, before, after in chosen:
            room = next(room for room in ROOMS if (ROOT / "fednmap" / room / f"{method}.py").exists())
            file = copy / "fednmap" / room / f"{method}.py"
            text = file.read_text()
            if text.count(before) != 1:
                raise ValueError(f"{method}: {before!r} occurs {text.count(before)} times; correct MUTATIONS")
            file.write_text(text.replace(before, after))
            failed = first_failure(copy, "test_privacy" if room == "privacy" else NAMED.get(method, method))
            file.write_text(text)
            survived += failed is None
            print(f"{method:15} {damage:27} {failed or 'SURVIVED'}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--turn", type=int)
    given = parser.parse_args()
    sys.exit(main(given.methods, given.turn))
