"""Connections: how the workers of a group find each other and communicate. There is one module per backend.

A connection is a small picklable object that the driver sends to each worker. Its methods import the framework inside
the worker, so the driver does not need the framework.
"""
