"""The time of one worker: every second falls into a bin."""
