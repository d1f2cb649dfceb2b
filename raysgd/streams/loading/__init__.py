"""Batches made of the rows of a stream: here, or in processes that work ahead."""
