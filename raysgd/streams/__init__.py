"""Streams: training data without random access, such as files that are read from beginning to end.

A stream consists of shards, such as files. A pass reads all shards once. For this, the rows of the shards are divided
into a fixed number of sequences, the lanes. A global batch (the rows that all workers train on in one step) takes its
rows from the lanes in turn. A pass over a stream guarantees:

* Each row is in exactly one global batch, unless a filter or an option such as `take` or `drop_last` leaves it out. The
  rows of a global batch do not depend on the number of workers.
* A pass can continue after any global batch, with any number of workers up to the number of lanes. Earlier rows are not
  read again, except rows that were buffered for shuffling, and except in formats that can only be read from the
  beginning.
* Each global batch is divided nearly evenly among the workers. No worker gets a batch with a single row if this can be
  avoided.

An evaluation on a stream of unknown length is an exception: each worker then reads its own lanes, and forms its own
batches.

This package does not depend on a framework, and does not communicate itself. Its callers provide a function that sums
numbers over all ranks.

ADR 119 explains why streams have lanes, and what ranks communicate.
"""
