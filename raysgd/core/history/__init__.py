"""Measurements by epoch, as numbers, text and cards."""
