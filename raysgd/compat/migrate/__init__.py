"""`raysgd migrate`: rewrites programs for the old library, and names what a person has to decide.

`source.py` rewrites one file's text, `names.py` its imports and what they bind, `calls.py` calls that pass what is no
longer taken, and `files.py` goes through files and folders. `layout.py` keeps arguments with their comments, and
`datasets.py` knows what is a dataset of Ray. Nothing here runs the programs.
"""
