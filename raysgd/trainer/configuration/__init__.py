"""What users configure of a trainer: options of batches, placement, recovery, and the settings that workers get."""
