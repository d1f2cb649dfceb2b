"""The framework-free core: it keeps N replicas alive and runs functions on all of them.

What it guarantees:

* A call either returns one value per rank, in rank order, or raises once; remote faults never surface half-way.
* Worker and node loss is answered in one place, `recovery.py`; only the controller retries.
* After `stop` no actor, placement group or thread of the engine is left.

What it leaves to others: frameworks (a `Replica` brings its own), communication (a `Connection`), words for users (a
front end). Nothing in here imports a training framework, and the modules that only decide (`policies`, `liveness`,
`ranks`) do not import Ray either.

To read it: `controller` runs calls in their turn, and `recovery` follows a failure. Both use the `lifecycle` of the
group, the `monitor` of what runs, and `snapshots`. The `group` owns its workers, `startup` has those beside it,
`placement` the room that they hold, `worker` what runs in them.
"""
