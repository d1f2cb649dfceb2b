"""Everything about optimizer steps: computes gradients, steps learning rate schedulers, undoes interrupted batches."""
