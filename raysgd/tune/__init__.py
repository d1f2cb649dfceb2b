"""Ray Tune: training functions on many workers as trials.

What it guarantees: a trial starts workers of its own, reports what rank 0 reports, and gives its checkpoints to Tune.
What it leaves to others: the search is Tune's. No other package of raysgd imports it.
"""
