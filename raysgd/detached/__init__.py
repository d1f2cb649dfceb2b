"""Detached trainers, which outlive the program that created them. Each runs in a detached Ray actor.

This package guarantees that a call that has started runs exactly once, even if the program ends, and that its answer is
stored until a program has received it. A detached trainer that no program needs anymore ends and frees its resources.

Inside the actor runs an ordinary trainer, so the engine handles worker failures. Any program that is connected to the
same Ray cluster may attach. ADR 122 describes the design.
"""
