"""The state that a trainer keeps: in files, and in the journal of its host."""
