"""The framework-free core: it keeps N replicas alive and runs functions on all of them.

What it guarantees:

* A call either returns one value per rank, in rank order, or raises once. Remote faults never surface half-way.
* `recovery.py` alone handles the loss of workers and nodes. Only the controller retries.
* After `stop` no actor, placement group or thread of the engine is left.

It leaves frameworks to a `Replica`, communication to a `Connection`, and words for users to a front end. Nothing in
here imports a training framework. The modules that only decide (`policies`, `liveness`, `ranks`) do not import Ray
either.

Start reading at `controller`, which runs calls one after the other, and `recovery`, which handles failures. Both use
the `lifecycle` of the group, the `monitor` of the running call, and `snapshots`. The `group` owns its workers.
`startup` has the standby workers, `placement` the reserved resources, and `worker` the code of the worker processes.
"""
