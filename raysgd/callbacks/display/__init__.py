"""Displays of callbacks: progress bars, and the page of a report."""
