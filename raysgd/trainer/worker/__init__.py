"""One worker of a class-based trainer. Hosts the operator and answers the driver's calls."""
