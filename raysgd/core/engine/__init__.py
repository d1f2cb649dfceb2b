"""The framework-free core: keeps N replicas alive and runs functions on all of them.

It guarantees:

* A call either returns one value per rank, in rank order, or raises one error. It never returns partial results.
* Only `repair` handles the loss of workers and nodes. Only the controller retries calls.
* After `stop`, no actor, placement group or thread of the engine is left.

A `Replica` implements the framework's part, a `Connection` the communication, and a front end the messages for users.
No module of the engine imports a training framework. The modules that only make decisions (`policies`, `liveness`,
`ranks`) do not import Ray either.

Start reading at `controller`, which runs the calls one at a time, and `repair`, which handles failures. Both use
`lifecycle` (starts and stops the group), `monitor` (watches the running call) and `snapshots`. `group` owns the
workers, `startup` the standby workers and `placement` the reserved resources. `worker` is the code of worker processes.
"""
