"""Store bytes under keys. A store knows nothing of tensors.

Terms: a *store* holds objects; an *upload* is an object that is not visible until it is committed.
``store.py`` states the contract, and ``limpet.testing.StoreContract`` tests it.
May import: the root modules.
"""
