"""What the engine asks the table of `raysgd.core.engine.recovery.machine`, one transition after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.recovery.machine import (
    Abandon,
    CopyInside,
    Do,
    End,
    Evacuate,
    Event,
    Finished,
    Known,
    Raise,
    Record,
    Running,
    Settling,
    State,
    TearingDown,
    Transition,
)
from tests.simulator.kernel import Stopped

if TYPE_CHECKING:
    from tests.simulator.running import Simulation

Visit = tuple[State, Event, Known]
"""What the table was asked."""

MOST_VISITS = 1000
"""Of a schedule: some ten times what the longest of thousands takes."""


class Transitions:
    """Records the transitions of a simulation.

    Attributes:
        visited: All of them so far.
        watches_only_state: Whether a state that only workers have is given up only if none of them can send it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.visited: list[Visit] = []
        self.watches_only_state = False

    def follow(self, controller: ElasticController) -> None:
        """From now on, record those of this controller."""
        recovery = controller.recovery
        next_of = recovery._next

        def visit(state: State, event: Event, known: Known) -> Transition:
            self.visited.append((state, event, known))
            transition = self._checked(next_of, state, event, known)
            self._simulation.tell(
                f"TABLE {_short(state)} {_short(event)} -> {_short(transition.state)} {_commands(transition)}"
            )
            if self.watches_only_state:
                self._watch(transition)
            return transition

        recovery._next = visit  # type: ignore[method-assign]

    def _checked(self, next_of: Callable[[State, Event, Known], Transition], *asked: Any) -> Transition:
        """What follows. Where that is not known, the call ends: the interpreter would ask again and again."""
        invariants, kernel = self._simulation.invariants, self._simulation.kernel
        invariants.require(len(self.visited) < MOST_VISITS, "a recovery without an end")
        try:
            if kernel.stopped_by is None:
                transition = next_of(*asked)
                state, known = transition.state, asked[-1]
                invariants.require(known.in_call or not isinstance(state, Running), "workers run a call without one")
                is_left = not isinstance(state, TearingDown) or bool(state.members)
                invariants.require(is_left, "a group is left by no one")
                return transition
        except Exception as error:
            invariants.fail(f"the table raised {error!r}")
        return Transition(Finished(Raise(End.INTERRUPTED, error=Stopped(kernel.stopped_by))))

    def _watch(self, transition: Transition) -> None:
        invariants, controller, state = self._simulation.invariants, self._simulation.controller, transition.state
        change = state.change if isinstance(state, Settling) else None
        if isinstance(change, CopyInside | Evacuate) and not change.num_copies:
            self._befallen = dict(self._simulation.befalling.kinds)
            group = self._simulation.controller.running
            workers = zip(group.workers, group.processes, strict=True)
            # A newcomer may not have received the state yet.
            self._living = [each for worker, each in workers if not each.is_dead and worker not in controller.newcomers]
        elif Do.GIVE_STATE_UP in transition.commands:
            invariants.check_given_up_state(self._living, self._befallen)


def _short(thing: object) -> str:
    return type(thing).__name__


def _commands(transition: Transition) -> list[str]:
    def word(command: object) -> str:
        if isinstance(command, Record):
            return f"Record({command.kind})"
        return "Abandon" if isinstance(command, Abandon) else command.name  # type: ignore[attr-defined]

    return [word(command) for command in transition.commands]
