"""Values that the tree needs more code for: NumPy's dtypes, torch's types, and refused values.

Terms: *rejection*: a value that cannot be saved, with the reason and advice for its kind.
May import: the root modules.
"""
