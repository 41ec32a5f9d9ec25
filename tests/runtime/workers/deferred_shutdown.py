"""Shuts Horovod down while steps wait, and looks whether they were made."""

import horovod.torch as hvd
from cases_deferred_updates import expected, make, steps, unseen, waits
from common import assert_close

if __name__ == "__main__":
    hvd.init()
    wanted = expected()
    model, distributed = make()
    held = list(model.parameters())
    steps(model, distributed)
    assert waits(distributed) == len(held)
    hvd.shutdown()
    assert_close(unseen(held), wanted)
