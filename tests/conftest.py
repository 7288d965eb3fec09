"""One thread a process: the tests run side by side, and their products are small."""

import torch

torch.set_num_threads(1)
