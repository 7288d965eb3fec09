"""A federation inside one process: Flower's Grid with nodes that are called, and may fail, on demand."""

from collections import deque
from itertools import count

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fednmap import simulate
from fednmap.flower import roster
from fednmap.flower.client import client_app
from fednmap.flower.local import LocalProblem
from fednmap.flower.plan import plan_from
from fednmap.flower.server import Coordinator
from fednmap.flower.settings import read
from fednmap.problems import LeastSquares
from fednmap.runs import checkpoints
from fednmap.runs.execution import settings
from fednmap.runs.experiment import architecture
from fednmap.runs.uplink_config import grid_of

NAMES = ("anna", "bert", "cleo", "dora")

roster.POLL = 0.05  # these nodes have answered when they are asked


def make_problem(n=4, dim=6, rows=12, dtype=torch.float64, batch_size=None, **options):
    """Well-conditioned least squares on heterogeneous clients."""
    rng = torch.Generator().manual_seed(3)
    data = []
    for i in range(n):
        a = torch.linalg.qr(torch.randn(rows, dim, generator=rng, dtype=dtype))[0] * rows**0.5 * (1 + 0.1 * i)
        data.append((a, a @ (torch.randn(dim, generator=rng, dtype=dtype) + i)))
    return LeastSquares(data, batch_size=batch_size, **options)


def context(name, run_config, states):
    """What a client's app is told of itself."""
    about = {"client": name, "state-dir": str(states)}
    return Context(run_id=1, node_id=1, node_config=about, state=RecordDict(), run_config=run_config)


class FakeGrid(Grid):
    """Nodes that answer when their reply is pulled.

    fault(name, message, answer) decides what comes of a message; `answer()` lets the client work and returns its
    reply. It returns the replies that arrive, as a list.
    """

    def __init__(self, nodes, app, run_config, states, fault=None):
        self.nodes, self.app, self.run_config, self.states = dict(nodes), app, run_config, states
        self.fault = fault or (lambda name, message, answer: [answer()])
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # messages carry them
        self.contexts, self.about = {}, {}
        self.number, self.inbox, self.late, self.asked = count(1), {}, deque(), []

    def set_run(self, run): ...

    @property
    def run(self): ...

    def create_message(self, *arguments, **options): ...

    def send_and_receive(self, messages, *, timeout=None): ...

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(str(next(self.number)))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.inbox[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids):
        replies = list(self.late)
        self.late.clear()
        for id in message_ids:
            message = self.inbox.pop(id, None)
            if message is not None and message.metadata.dst_node_id in self.nodes:
                name = self.nodes[message.metadata.dst_node_id]
                self.asked.append((name, message))
                replies += self.fault(name, message, lambda m=message, n=name: self.answer(n, m))
        return replies

    def answer(self, name, message):
        try:
            node = message.metadata.dst_node_id  # a restarted node has another number, and has forgotten
            if node not in self.contexts:
                self.contexts[node] = context(name, self.run_config, self.states)
                self.contexts[node].node_config |= self.about.get(node, {})
                self.contexts[node].node_id = node
            kept = self.contexts[node]
            return self.app(message=message, context=kept)
        except (ValueError, RuntimeError) as error:  # as Flower does
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=str(error)), reply_to=message)


class Federation:
    """Everything that a run needs, on a folder: `start()` begins it, `start(resume=True)` goes on."""

    def __init__(self, folder, problem=None, names=NAMES, fault=None, **given_settings):
        self.problem = make_problem() if problem is None else problem
        self.folder, self.names, self.fault = folder, names, fault
        given = {"eta-a": 0.1, "local-steps": 5, "penalty": "l1:0.5", "rounds": 6, "eval-every": 3, "batch-size": 0}
        given |= {
            "dtype": "float64",
            "data": "own",
            "model": "least-squares",
            "deadline": 5.0,
            "min-clients": 1,
            "measure-stationarity": True,
        }
        given |= {"names": ",".join(names), "run-folder": str(folder / "run")}
        self.settings = given | {key.replace("_", "-"): v for key, v in given_settings.items()}
        self.config, self.federation = read(self.settings)

    def load(self, context):
        one = self.problem.alone(self.names.index(context.node_config["client"]))
        one.first = 0  # the client holds its own rows and nothing that says which client it is
        return LocalProblem(one)

    def start(self, fault=None, nodes=None, about=None, **settings):
        """about: node -> more of its own configuration."""
        run_config = self.settings | {key.replace("_", "-"): v for key, v in settings.items()}
        config, federation = read(run_config)
        nodes = nodes or {101 + i: name for i, name in enumerate(self.names)}
        self.grid = FakeGrid(nodes, client_app(self.load), run_config, self.folder / "states", fault or self.fault)
        self.grid.about = about or {}
        self.coordinator = Coordinator(self.grid, config, federation, lambda config, start: self.plan())
        return self.coordinator.run()

    def plan(self):
        return plan_from(self.config, self.problem.start, architecture(self.problem))

    def simulated(self, rounds=None):
        """The server's state as the simulator has it."""
        plan, config = self.plan(), self.config
        options = {"participation": config.participation, "seed": config.seed, "start": plan.start}
        options["uplink"] = grid_of(config, len(self.names))
        *_, end = simulate(plan.algorithm, self.problem, rounds=rounds or config.rounds, **options)
        return end.server

    def server(self):
        """The server's state in the newest checkpoint."""
        c = self.coordinator
        folder, algorithm = c.folder.checkpoints(c.job), c.plan.algorithm
        kept, refused = checkpoints.newest(folder, algorithm, c.plan.start, settings(c.config))
        assert not refused
        return kept.server, kept.totals["counted"]

    def client_states(self):
        """The clients' states that count, from their disks."""
        from fednmap.flower.state_store import Store

        _, counted = self.server()
        initial = self.coordinator.plan.algorithm.init(self.coordinator.plan.start)[1]
        run = self.coordinator.run_id
        return [Store(self.folder / "states", run, name).current(counted[name], initial) for name in self.names]
