"""One worker of a class-based trainer: it hosts the operator and answers the calls of the driver."""
