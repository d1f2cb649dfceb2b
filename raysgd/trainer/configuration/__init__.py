"""What users configure on a trainer: batch options, placement, recovery, and the settings that workers receive."""
