"""The position in the training data, and the state of the random generators.

Terms: a *sample* is one element of the dataset; an *epoch* is one pass over all samples.
May import: the root modules. This package knows nothing of snapshots or stores.
"""
