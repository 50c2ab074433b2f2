"""A fuzz of process groups: random programs and random faults of scripts that use `torch.distributed` on hvdlite.

    python -m tests.torch.distributed.fuzz --seeds 0:200 --ranks 2,3,4
    python -m tests.torch.distributed.fuzz --faults --seeds 0:100 --ranks 3

A program is a number of steps, drawn from a seed: a call of a group, groups that come and go, threads that use different
groups. Each step is drawn from the seed and its number alone, so a program that fails can be cut down (`--steps 5:9`,
`--only all_reduce,messages`). Every rank can draw the values of all ranks; so it computes the results with plain torch.

`values.py` draws tensors, and reduces them. `calls.py` has the calls. `program.py` draws the steps and carries them out on a
rank. `faults.py` lets one rank of a program do something wrong. `jobs.py` starts ranks and names the seeds that fail.
"""
