"""Trainers that outlive the program that made them: each lives in its own process, a detached actor.

This package guarantees that a call which has begun continues without the program, runs once, and keeps its answer until
a program has received it. A detached trainer that no one needs any more ends and frees its resources.

The trainer in that process is an ordinary one, so the engine handles failures of workers. Ray decides who may attach.
The design is ADR 122.
"""
