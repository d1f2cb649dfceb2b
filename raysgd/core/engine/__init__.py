"""The framework-free core: keeps N replicas alive and runs functions on all of them.

It guarantees:

* A call either returns one value for each rank that runs it, in rank order, or raises one error. It never returns
  partial results.
* Calls are retried, and lost workers and nodes handled, in one class: `recovery.interpreter.Interpreter`.
* After `stop`, no actor, placement group or thread of the engine is left.

The rest of the library supplies three parts: a `Replica` holds the framework's model in a worker, a `Connection`
connects workers with each other, and a front end (such as `TorchTrainer`) makes the calls and supplies the wording of
errors.

No module of the engine imports a training framework. The modules that only make decisions (`policies`,
`recovery.machine`) do not import Ray either.

Start reading at `recovery.machine`, the table of what follows what in a call and after a failure, and at
`recovery.interpreter`, which waits for what the table names. `controller` runs the calls one at a time. They use
`lifecycle` (starts and stops the group), `monitor` (watches the running call) and `snapshots`. `group` owns the
workers, `standby` the standby workers (outside the group, ready to replace lost workers) and their calls beside
training, and `placement` the reserved resources. `worker` is the code that runs in worker processes, and
`platform` how the driver reaches it.
"""
