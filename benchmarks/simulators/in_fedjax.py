"""The same job in FedJAX 0.0.17: its own federated averaging on a haiku network."""

import warnings

import numpy as np
from job import BATCH, CLASSES, CLIENTS, HIDDEN, INPUTS, RATE, STEPS, batches, client, report

warnings.filterwarnings("ignore")
import jax  # noqa: E402

jax.tree_map = jax.tree_util.tree_map  # FedJAX asks for the name that jax has since removed
import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402


class Client(fedjax.ClientDataset):
    """A client whose batches are those of the job, new in each round."""

    def __init__(self, i):
        x, y = client(i)
        super().__init__({"x": x, "y": y.astype(np.int32)})
        self.i, self.t = i, -1

    def shuffle_repeat_batch(self, hparams=None, **options):
        self.t += 1
        return ({name: v[rows] for name, v in self.raw_examples.items()} for rows in batches(self.i, self.t))


def forward(batch):
    return hk.Sequential([hk.Linear(HIDDEN), jax.nn.sigmoid, hk.Linear(CLASSES)])(batch["x"])


def loss(batch, outputs):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["y"][:, None], 1)[:, 0]


model = fedjax.create_model_from_haiku(
    transformed_forward_pass=hk.transform(forward),
    sample_batch={"x": np.zeros((1, INPUTS), np.float32), "y": np.zeros(1, np.int32)},
    train_loss=loss,
)
fedjax.set_for_each_client_backend("jit")
steps = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=STEPS, seed=0)
sgd = fedjax.optimizers.sgd
algorithm = fed_avg.federated_averaging(fedjax.model_grad(model), sgd(RATE), sgd(1.0), steps)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))
keys = list(jax.random.split(jax.random.PRNGKey(1), CLIENTS))
clients = [(i, Client(i), key) for i, key in enumerate(keys)]


def one_round(t):
    global state
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)


report(one_round)
