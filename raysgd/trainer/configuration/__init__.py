"""Classes for the arguments of a trainer: batch options, placement, recovery, and the settings that workers receive."""
