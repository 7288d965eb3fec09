"""The same methods between real machines, on Flower: one adapter for every `fednmap.core.Algorithm`.

settings     what a federation agrees on, read from the app's run configuration
local        LocalProblem: what a client supplies
wire         messages as named arrays, and the check of what arrives
ledger       a client's state on its own disk
preflight    what a site says of itself, and what does not fit together
masking      secure aggregation: keys, shares, masks
secure       secure aggregation: the messages of its stages
identity     names bound to the keys of nodes
audit        a client's log of what it sent
client       the ClientApp
plan         what server and clients must know of a run
roster       which node speaks for which client
server       the ServerApp: the round loop with deadline, repetition and checkpoints
local_federation  the app that `fednmap flower up` runs
launch       SuperLink and SuperNodes on this machine
loopback     their ports serve one user alone
keys         certificates and node keys

Everything that imports flwr is in this room.
"""
