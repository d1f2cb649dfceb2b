"""Connections: how the workers of a group find each other and communicate. One module for each kind.

A connection is a small picklable object that is sent to each worker and used there. Its methods import the framework,
so the driver needs none.
"""
