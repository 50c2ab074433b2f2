"""The authority of an elastic job: each rule, each cell of its tables, all orders of events, and random events.

`python -m tests.membership` runs 10^6 random events.
"""
