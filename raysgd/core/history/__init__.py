"""Measurements by epoch: values, text and cards."""
