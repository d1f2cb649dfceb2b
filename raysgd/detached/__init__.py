"""Trainers that outlive the program that created them. Each runs in a detached actor.

This package guarantees that a call that has started continues without the program, runs once, and that its answer is
stored until a program has received it. A detached trainer that no program needs anymore ends and frees its resources.

Inside the actor runs an ordinary trainer, so the engine handles worker failures. Ray decides who may attach. The design
is described in ADR 122.
"""
