"""Elastic training of a number by a schedule, with no framework."""

import numpy as np
from horovod.common.elastic import ObjectState

import hvdlite as hvd
from tests.compat.programs.scheduled import Schedule

hvd.init()
schedule = Schedule()


def step():
    state.total += float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


@hvd.elastic.run
def train(state):
    schedule.train(hvd, state, step)


state = ObjectState(total=0.0, epoch=0, batch=0, commits=0, worlds=0)
train(state)
assert (hvd.allgather(np.array([state.total])) == state.total).all() and state.total >= state.epoch
