"""Store objects as files in HDFS, through hdfs-native.

Terms: the *NameNode* keeps the names and lengths of files, and *DataNodes* keep their blocks. The
*lease* of a file belongs to the client that writes it, until the file is closed.
May import: the root modules and ``storage``.
"""
