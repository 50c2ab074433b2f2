"""Elastic jobs as users start them: hvdrun, ranks that die at any moment, and what they leave.

`python -m tests.elastic` is the long campaign: random kills in many jobs.
"""
