"""Detached trainers, which outlive the program that created them. Each runs in a detached Ray actor.

A call to a detached trainer, such as `train`, runs exactly once and to its end, even if the program that made the call
ends. The result is stored until a program has received it. A detached trainer that no program needs anymore ends and
frees its resources.

The actor contains an ordinary trainer, which handles failures of workers as it does in any program. Every program that
is connected to the same Ray cluster may attach to the trainer. ADR 122 (docs/adr) describes the design.
"""
