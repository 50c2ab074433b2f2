"""The authority of an elastic job: each rule, and random events against a model of members.

`python -m tests.membership` runs 10^6 random events.
"""
