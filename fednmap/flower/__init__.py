"""The same methods between real machines, on Flower: one adapter for every `fednmap.core.Algorithm`.

settings     what a federation agrees on, read from the app's run configuration
local        LocalProblem: what a client supplies
wire         messages as named arrays, and the check of what arrives
ledger       a client's state on its own disk
client       the ClientApp
plan         what server and clients must know of a run
roster       which node speaks for which client
server       the ServerApp: the round loop with deadline, repetition and checkpoints
trial        the app that `fednmap flower up` runs
launch       SuperLink and SuperNodes on this machine
keys         certificates and node keys

Only `wire`, `client`, `roster` and `server` import flwr.
"""
