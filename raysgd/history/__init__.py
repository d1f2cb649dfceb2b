"""What was measured, epoch by epoch: numbers, text, cards and charts."""
