"""One run of a training function: its launch, its steps, its hooks."""
