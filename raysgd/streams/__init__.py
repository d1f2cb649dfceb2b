"""Streams: data without random access, of which every row is used exactly once per pass.

A stream consists of shards, such as files. A pass reads all of them once, in lanes: a fixed number of row sequences
through the shards. A pass guarantees:

* The rows of a global batch do not depend on the number of workers, and each row is in exactly one global batch.
* A pass can resume at any global batch, with any number of workers. It does not reread earlier rows, except rows in
  shuffle buffers, and except in formats that can only be read from the beginning.
* The workers' parts of a global batch differ by at most one row.

This package depends on no framework and does not communicate. The caller provides a function that all-reduces sums over
the ranks.

ADR 119 explains why streams have lanes, and what ranks communicate.
"""
