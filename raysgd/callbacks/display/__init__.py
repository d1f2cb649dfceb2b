"""What callbacks show: progress bars, and the page of a report."""
