"""Trains on a GPU among one rank, whose operations are NCCL's, under every plan."""

import horovod.torch as hvd
import torch
from cases_exchanges import compare

hvd.init()
torch.set_default_device("cuda")
compare()
print("as under Horovod's own optimizer")
