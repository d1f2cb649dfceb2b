"""Data and protocols that all parts of the engine share. Workers may load any of these modules."""
