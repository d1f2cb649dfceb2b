"""What keeps programs for the old library running where the code they import has a new name or place.

`names.py` lists the single names. The packages that are old addresses themselves, `raysgd.v2` and `raysgd.data`, stay
where programs import them from; docs/adr/0062-former-names-in-one-table.md says why.
"""
