"""Keeps replicas in sync: averages gradients, scales losses, and merges metrics and variables over all workers."""
