"""Measurements, epoch by epoch: as numbers, text and cards."""
