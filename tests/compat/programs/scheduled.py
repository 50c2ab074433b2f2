"""The training loop of `scheduled_*.py`, whatever the framework: processes fail and hosts change in given epochs."""

import argparse
import json
import os
import signal
import time

BATCHES = 10
"""Of an epoch."""
FAILS_AT = 2
"""The batch before which processes fail."""


class Schedule:
    """What happens in which epoch, from the command line; rank 0 records each epoch in a line of JSON.

    Attributes:
        hostname, start_rank: where this process began, and with which rank.
    """

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--record", help="the file for the epochs")
        parser.add_argument("--epochs", type=int, default=3)
        parser.add_argument("--fail-in", type=int, nargs="*", default=(), help="epochs in which processes fail")
        parser.add_argument("--ranks", type=int, nargs="*", default=(), help="with which ranks those began")
        parser.add_argument("--kill", action="store_true", help="they are killed; else they raise")
        parser.add_argument("--change-after", type=int, nargs="*", default=(), help="epochs after which other ranks come")
        self._given = parser.parse_args()
        self.hostname, self.start_rank = os.environ["HOROVOD_HOSTNAME"], int(os.environ["HOROVOD_RANK"])

    def train(self, hvd, state, step):
        """Train from the state's epoch and batch on, and commit after each batch and epoch."""
        state.worlds += 1
        while state.epoch < self._given.epochs:
            while state.batch < BATCHES:
                self._fail(hvd, state)
                step()
                state.batch += 1
                state.commits += 1
                state.commit()
            if hvd.rank() == 0:
                self._record(hvd, state)
                while state.epoch in self._given.change_after and state._host_messages.empty():
                    time.sleep(0.01)
            state.epoch += 1
            state.batch = 0
            state.commits += 1
            state.commit()

    def _fail(self, hvd, state):
        if state.epoch not in self._given.fail_in or state.batch != FAILS_AT:
            return
        hvd.barrier()  # one that alone has the last commit would stay for another world, whatever its host (decision 34)
        if self.start_rank not in self._given.ranks:
            return
        if self._given.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"fails in epoch {state.epoch}")

    def _record(self, hvd, state):
        epoch = {"epoch": state.epoch, "batch": state.batch, "commits": state.commits, "worlds": state.worlds,
                 "rank": hvd.rank(), "size": hvd.size(), "hostname": self.hostname, "start_rank": self.start_rank}
        with open(self._given.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(epoch) + "\n")
