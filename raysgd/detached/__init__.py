"""Trainers that outlive the program that made them: each lives in its own process, a detached actor.

What this package promises: a call that has begun goes on without the program, happens once, and its answer waits until
a program has it. A detached trainer that no one needs any more ends and gives its resources back.

What it leaves to others: the trainer in that process is an ordinary one, so failures of workers are the engine's
business, and who may attach to it is decided by Ray. The design: ADR 122.
"""
