"""The same job in pfl-research 0.6: its own federated averaging; under torchrun in several processes."""

import logging
import os

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")
import torch
from job import BATCH, CLASSES, CLIENTS, HIDDEN, INPUTS, RATE, ROUNDS, STEPS, batches, client, now, print_rounds
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

torch.set_num_threads(1)
logging.disable(logging.WARNING)


class Net(nn.Sequential):
    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(0.0, len(x))}


class Client(Dataset):
    """A client whose batches are those of the job, new in each round."""

    def __init__(self, i):
        super().__init__(tuple(map(torch.from_numpy, client(i))), user_id=str(i))
        self.i, self.t = i, -1

    def iter(self, batch_size):
        self.t += 1
        x, y = self.raw_data
        return ((x[rows], y[rows]) for rows in batches(self.i, self.t))


class Clock(TrainingProcessCallback):
    marks = [now()]  # noqa: RUF012

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.marks.append(now())
        return False, Metrics()


clients = {i: Client(i) for i in range(CLIENTS)}
data = FederatedDataset(clients.__getitem__, get_user_sampler("minimize_reuse", list(range(CLIENTS))))
net = Net(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, CLASSES))
model = PyTorchModel(
    net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0)
)
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=ROUNDS + 2,
        evaluation_frequency=10**6,
        train_cohort_size=CLIENTS,
        val_cohort_size=None,
    ),
    SimulatedBackend(training_data=data, val_data=data),
    model,
    NNTrainHyperParams(local_num_epochs=None, local_num_steps=STEPS, local_learning_rate=RATE, local_batch_size=BATCH),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[Clock()],
    send_metrics_to_platform=False,
)
if pytorch_ops.distributed.global_rank == 0:
    print_rounds(Clock.marks)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
