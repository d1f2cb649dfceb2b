"""One worker of a class-based trainer: hosts the operator and answers the driver's calls."""
