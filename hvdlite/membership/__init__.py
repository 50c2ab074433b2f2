"""Membership of an elastic job, as code without sockets, threads or clocks: who is in which world, and what is recovered."""
