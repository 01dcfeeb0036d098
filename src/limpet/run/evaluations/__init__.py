"""What is recorded about versions after they were saved: metrics, failures, verdicts, and leases.

Terms: an *evaluation* of a version has a result, or it failed. A *verdict* says whether a version
can be trusted. A *lease* is how long an evaluation that runs protects its versions.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, and ``convert``.
"""
