"""The same job in Flower 1.41's simulation: its FedAvg, two Ray actors.

Run it where nothing but the loopback interface exists, since Ray looks for other machines:
unshare -n sh -c 'ip link set lo up; exec python in_flower.py 10'
"""

import os
import tempfile
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
    os.environ[name] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)

import logging  # noqa: E402

import numpy as np  # noqa: E402
from job import CLIENTS, ROUNDS, client, now, print_rounds  # noqa: E402

marks = [now()]


def main(folder):
    os.environ["PEER_DATA"] = folder
    samples = [client(i) for i in range(CLIENTS)]
    np.save(f"{folder}/x.npy", np.stack([x for x, _ in samples]))
    np.save(f"{folder}/y.npy", np.stack([y for _, y in samples]))
    import flower_client
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    server = ServerApp()

    class Timed(FedAvg):
        def summary(self):
            pass

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            if len(replies) < CLIENTS or any(reply.has_error() for reply in replies):
                raise RuntimeError(f"round {server_round}: not every client replied without an error")
            found = super().aggregate_train(server_round, replies)
            marks.append(now())
            return found

    @server.main()
    def serve(grid, context):
        grid.pull_interval = 0.005
        while len(list(grid.get_node_ids())) < CLIENTS:
            time.sleep(0.05)
        marks[:] = [now()]
        everybody = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, **everybody)
        first = ArrayRecord(flower_client.net().state_dict())
        strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS + 2)

    ray = {"num_cpus": 2, "_node_ip_address": "127.0.0.1", "logging_level": "ERROR", "log_to_driver": False}
    ray["object_store_memory"] = 500 * 2**20
    backend = {"client_resources": {"num_cpus": 1}, "init_args": ray}
    run_simulation(server, flower_client.app, num_supernodes=CLIENTS, backend_config=backend)


with tempfile.TemporaryDirectory() as folder:
    main(folder)
print_rounds(marks)
