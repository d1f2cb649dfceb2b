"""Arrays and batches without a framework: nesting, division, and joining."""
