"""The same job in FedLab 1.3: its standalone pipeline, server handler and serial trainer."""

import logging
import warnings

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from job import BATCH, CLASSES, CLIENTS, HIDDEN, INPUTS, RATE, ROUNDS, batches, client, now, print_rounds  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
# FedLab imports torchvision, whose own operators do not load beside a CPU build of torch; nothing here calls them.
operators = torch.library.Library("torchvision", "DEF")
operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402


class Data:
    """Every client's samples; a loader is asked for once per client and round."""

    def __init__(self):
        self.samples = [tuple(map(torch.from_numpy, client(i))) for i in range(CLIENTS)]
        self.round = [0] * CLIENTS

    def get_dataloader(self, i, batch_size):
        (x, y), t = self.samples[i], self.round[i]
        self.round[i] += 1
        return ((x[rows], y[rows]) for rows in batches(i, t))


class Timed(StandalonePipeline):
    marks = [now()]  # noqa: RUF012

    def evaluate(self):
        """What FedLab calls at the end of a round."""
        self.marks.append(now())


def net():
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, CLASSES))


quiet = logging.getLogger("quiet")
quiet.setLevel(logging.ERROR)
trainer = SGDSerialClientTrainer(net(), CLIENTS, cuda=False, logger=quiet)
trainer.setup_dataset(Data())
trainer.setup_optim(1, BATCH, RATE)
handler = SyncServerHandler(net(), ROUNDS + 2, 1.0, cuda=False, logger=quiet)
Timed(handler, trainer).main()
print_rounds(Timed.marks)
