"""Every method on a graph with step sizes that suit smoothness L: what `check_decentralized` calls `make`."""

from fednmap import decentralized as D

MAKE = {
    "NormDSGT": lambda phi, L: D.NormDSGT(phi, eta_a=0.12 / L, gamma=1 / L),
    "NormED": lambda phi, L: D.NormED(phi, eta_a=0.5 / L, gamma=1 / L),
    "ProxDSGD": lambda phi, L: D.ProxDSGD(phi, eta_a=0.5 / L),
    "PGExtra": lambda phi, L: D.PGExtra(phi, eta_a=0.5 / L),
}
