"""Store objects in Azure Blob Storage and in Google Cloud Storage, through obstore.

Terms: a *container* is what Azure calls so, or a bucket of Google. An *endpoint* is one account or
server, with the limits of its requests. May import: the root modules and ``storage``.
"""
