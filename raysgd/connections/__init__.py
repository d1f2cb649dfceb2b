"""Ways in which the workers of a group find each other and talk: one module for each.

A connection is a small picklable object. It travels to each worker and is used there only; the framework is imported
inside its methods, so that the driver needs none.
"""
