"""What the engine asks the table of `raysgd.core.engine.recovery.machine`, one transition after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.recovery.states import (
    Abandon,
    CopyInside,
    Do,
    Evacuate,
    Event,
    Known,
    Record,
    Settling,
    State,
    Transition,
)

if TYPE_CHECKING:
    from tests.simulator.running import Simulation

Visit = tuple[State, Event, Known]
"""What the table was asked."""


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
            transition = next_of(state, event, known)
            self._simulation.tell(
                f"TABLE {_short(state)} {_short(event)} -> {_short(transition.state)} {_commands(transition)}"
            )
            if self.watches_only_state:
                self._watch(transition)
            return transition

        recovery._next = visit  # type: ignore[method-assign]

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
