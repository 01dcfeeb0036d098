"""What is recorded about versions after they were saved: metrics, failures, and leases.

Terms: an *evaluation* of a version has a result, or it failed. A *lease* is how long
an evaluation that runs protects its versions.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, and ``convert``.
"""
