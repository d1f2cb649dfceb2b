"""The training and validation data in one worker: streams of batches, and the position in each stream."""
