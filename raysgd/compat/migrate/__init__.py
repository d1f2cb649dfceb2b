"""Implements `raysgd migrate`, which rewrites programs for `ray.util.sgd` and the former `ray.train` and `ray.air`.

Programs are not executed. A line that only a person can rewrite is reported with advice.

`source.py` finds the files to rewrite, and rewrites each. `names.py` rewrites the file's imports and the imported
names, and `calls.py` rewrites outdated calls, with the tables in `calls.ini`. Comments beside code that is replaced
move to the lines above the statement.
"""
