"""`raysgd migrate`: rewrites programs for the old library, and names what a person has to decide.

`source.py` rewrites one file's text, `names.py` its imports and what they bind, `arguments.py` arguments that
were retired, `keras_calls.py` what today's Keras refuses, and `files.py` goes through files and folders. Nothing here
runs the programs.
"""
