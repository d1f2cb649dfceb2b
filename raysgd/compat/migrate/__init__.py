"""`raysgd migrate`: rewrites programs for `ray.util.sgd` and its successors, and reports what a person must decide.

`source.py` rewrites one file, `names.py` its imports and the names that they bind, `calls.py` calls with arguments that
are no longer accepted, and `files.py` walks files and folders. `layout.py` keeps comments with their arguments, and
`datasets.py` tracks Ray Data datasets. Nothing here runs the programs.
"""
