"""Rank 1 evaluates for long; rank 0 sticks in C as soon as a file exists."""

import itertools
import os
import sys
import time

import numpy as np

import hvdlite as hvd


def evaluate() -> None:
    time.sleep(600)


def stuck() -> None:
    sum(itertools.repeat(0, 100_000_000_000))


hvd.init()
print("ready", flush=True)
if hvd.rank():
    evaluate()
handle = hvd.allreduce_async(np.ones(1), name="x")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print("sticking", flush=True)
stuck()
