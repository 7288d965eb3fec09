"""Every method with step sizes that suit smoothness L: what `check_algorithm` calls `make`."""

from fednmap import algorithms as A

MAKE = {
    "FedNMap": lambda phi, L, Q: A.FedNMap(phi, eta_a=0.5 / (L * Q), Q=Q, gamma=1 / L),
    "CompressedFedNMap": lambda phi, L, Q: A.CompressedFedNMap(phi, eta_a=0.5 / (L * Q), Q=Q, gamma=1 / L, K=2),
    "FedNewton": lambda phi, L, Q: A.FedNewton(phi, gamma=1 / L),
    "Zhang": lambda phi, L, Q: A.Zhang(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedCanon": lambda phi, L, Q: A.FedCanon(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedDA": lambda phi, L, Q: A.FedDA(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedMiD": lambda phi, L, Q: A.FedMiD(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FastFedDA": lambda phi, L, Q: A.FastFedDA(phi, Q=Q, mu=0.1, gamma=2 * L),
    "EControlDA": lambda phi, L, Q: A.EControlDA(phi, Q=Q, K=3, gamma=8 * L),
    "FedDR": lambda phi, L, Q: A.FedDR(phi, eta_a=0.5 / L, Q=Q, r=1 / L, alpha=1.0),
    "FedADMM": lambda phi, L, Q: A.FedADMM(phi, eta_a=0.5 / L, Q=Q, beta=L),
    "SCAFFOLD": lambda phi, L, Q: A.SCAFFOLD(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedAvg": lambda phi, L, Q: A.FedAvg(phi, eta_a=0.5 / (L * Q), Q=Q),
    "PrunedFedAvg": lambda phi, L, Q: A.PrunedFedAvg(phi, eta_a=0.5 / (L * Q), Q=Q, zeros=0.3),
    "FedAvgM": lambda phi, L, Q: A.FedAvgM(phi, eta_a=0.1 / (L * Q), Q=Q),
    "FedAdam": lambda phi, L, Q: A.FedAdam(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedYogi": lambda phi, L, Q: A.FedYogi(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedAdagrad": lambda phi, L, Q: A.FedAdagrad(phi, eta_a=0.5 / (L * Q), Q=Q),
    "FedProx": lambda phi, L, Q: A.FedProx(phi, eta_a=0.5 / (L * Q), Q=Q, mu=0.1),
    "FedPD": lambda phi, L, Q: A.FedPD(phi, eta_a=0.5 / L, Q=Q, r=1 / L),
    "Scaffnew": lambda phi, L, Q: A.Scaffnew(phi, eta_a=0.5 / L, Q=Q),
    "ProxSGD": lambda phi, L, Q: A.ProxSGD(phi, eta_a=1 / L, Q=Q),
    "NormalMapSGD": lambda phi, L, Q: A.NormalMapSGD(phi, eta_a=0.5 / L, Q=Q, gamma=1 / L),
}
