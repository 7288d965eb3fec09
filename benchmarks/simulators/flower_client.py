"""The client of in_flower.py, a module so that Ray's actors import it once."""

import os

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from job import CLASSES, HIDDEN, INPUTS, RATE, SAMPLES, batches
from torch import nn

torch.set_num_threads(1)
app, kept = ClientApp(), {}


def net():
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, CLASSES))


@app.train()
def train(message, context):
    if not kept:  # once an actor
        folder = os.environ["PEER_DATA"]
        kept.update(net=net(), x=np.load(f"{folder}/x.npy", mmap_mode="r"), y=np.load(f"{folder}/y.npy"))
    model, i = kept["net"], int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = kept["x"][i], kept["y"][i]
    for rows in batches(i, int(message.content["config"]["server-round"]) - 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(x[rows])), torch.from_numpy(y[rows])).backward()
        optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(content=RecordDict(reply), reply_to=message)
