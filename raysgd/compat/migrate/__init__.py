"""`raysgd migrate`: rewrites programs for the old library, and reports what a person must decide.

`source.py` rewrites the text of one file, `names.py` its imports and the names they bind, `calls.py` calls with
arguments that are no longer accepted, and `files.py` walks files and folders. `layout.py` keeps comments with their
arguments, and `datasets.py` tracks datasets of Ray. Nothing here runs the programs.
"""
