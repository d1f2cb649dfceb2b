"""Data without an index, each row exactly once: one order of all rows for any number of workers, and the place in it.

What a pass over a stream promises:

* Which rows a global batch has does not depend on the number of workers, and each row is in one global batch.
* A pass continues at any global batch, with any number of workers, without reading what came before it again, but for
  what was in shuffle buffers, and for rows of a format that cannot be entered in the middle.
* The shares of the workers in a global batch differ by one row at most.

It knows no framework and no workers: who trains puts the sums between ranks in.

Why lanes, and what ranks tell each other: ADR 119.
"""
