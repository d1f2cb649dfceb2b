"""The state of one worker: read, checked, copied, put back."""
