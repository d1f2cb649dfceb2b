"""The data of one worker: streams of batches, and the position in them."""
