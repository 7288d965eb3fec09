"""The same methods between real machines, on Flower: one adapter for every `fednmap.core.Algorithm`.

settings     what a federation agrees on, read from the app's run configuration; who a node is
local        LocalProblem: what a client supplies
plan         what server and clients must know of a run
wire         messages as named arrays, and the check of what arrives
state_store  a client's state, and what it has answered, on its own disk
audit_log    a client's log of what it sent
client       the ClientApp
identity     certificates and keys; names bound to the keys of nodes
preflight    what a site says of itself, and what does not fit together
roster       which node speaks for which client, and asking them
masking      secure aggregation: keys, shares, masks
secure       secure aggregation: the messages of its stages
rounds       who is asked in a round, which replies count
late_replies rounds that do not wait for all
server       the ServerApp: run folder, measurements, checkpoints
table_app    the apps for a linear model of tables
local_federation  the app that `fednmap flower up` runs
new          the files of a new app
launch       SuperLink and SuperNodes on this machine; watchdog ends them with their launcher
worker       a process that keeps a client's data for a run
node         a SuperNode with warm processes
loopback     ports that serve one user alone

Everything that imports flwr is in this room.
"""
