"""Measurements, epoch by epoch: as numbers, text, cards and charts."""
