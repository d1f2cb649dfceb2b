"""One worker's data: streams of batches and the worker's position in them."""
