"""Store objects in S3 and in servers with its API, through boto3.

Terms: a *part* of a multipart upload; an *endpoint* is one server, with the limits of its requests.
May import: the root modules and ``storage``.
"""
