"""Example modules that existing programs import. To run or read examples, see the repository's folder `examples`."""
