"""Implements `raysgd migrate`, which rewrites programs for `ray.util.sgd` and the former `ray.train` and `ray.air`.

Programs are not executed. A line that only a person can rewrite is reported with advice.

`source.py` finds the files to rewrite, and rewrites each. `names.py` rewrites the file's imports and the imported
names, and `calls.py` rewrites outdated calls, with the tables in `calls.ini`. `layout.py` keeps comments with the
arguments that they belong to, and `datasets.py` finds the variables that are Ray Data datasets.
"""
