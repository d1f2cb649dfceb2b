"""Streams: training data without random access, such as files that are read from beginning to end.

A stream consists of shards, such as files. A pass reads all shards once. For this, the rows of the shards are divided
into a fixed number of sequences, the lanes. A global batch (the rows that all workers train on in one step) takes rows
from all lanes. A pass over a stream guarantees:

* Each row is in exactly one global batch, and the rows of a global batch do not depend on the number of workers.
* A pass can continue after any global batch, with any number of workers. Earlier rows are not read again, except rows
  that were buffered for shuffling, and except in formats that can only be read from the beginning.
* The numbers of rows that two workers have in a global batch differ by at most one.

This package does not depend on a framework, and does not communicate itself. Its callers provide a function that sums
numbers over all ranks.

ADR 119 explains why streams have lanes, and what ranks communicate.
"""
