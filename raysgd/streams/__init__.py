"""Data without an index, of which every row is used exactly once, in one order for any number of workers.

A pass over a stream promises:

* The rows of a global batch do not depend on the number of workers, and each row is in one global batch.
* A pass can continue at any global batch, with any number of workers. It does not read earlier rows again, except rows
  in shuffle buffers, and in formats that can only be read from the beginning.
* The workers' shares of a global batch differ by at most one row.

This package knows no framework and no workers. Its user provides the sums over ranks.

ADR 119 explains why there are lanes, and what ranks exchange.
"""
