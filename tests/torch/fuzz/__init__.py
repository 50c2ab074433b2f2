"""A fuzz of training loops: random programs on several ranks against plain torch in one process.

    python -m tests.torch.fuzz --seeds 0:200 --ranks 2

`program.py` draws a program from a seed: parameters, optimizers, and for every step what each rank does. `replica.py`
carries it out: `Replica` is a rank's model and optimizers, `Simulation` a replica for each rank in one process, with
gradients averaged by hand. `rank.py` carries it out with hvdlite: after each step every rank compares its parameters and
gradients with the simulation, and in the end ranks compare theirs with each other bit by bit. `jobs.py` starts the ranks and
names failing seeds.
"""
