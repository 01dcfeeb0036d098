"""Run the store contract with every real server."""

import uuid

import pytest

import limpet
from limpet.testing import StoreContract


class TestCeph(StoreContract):
    @pytest.fixture
    def store(self, s3):
        return limpet.open_store(f"{s3}/a/folder", part_size=8 << 20)


class TestCephBucket(StoreContract):
    """A whole bucket; all writes are collected into equal parts."""

    @pytest.fixture
    def store(self, s3):
        return limpet.open_store(s3, equal_parts=True, part_size=5 << 20)


class TestLocalStack(StoreContract):
    """A server that verifies CRC-32C, and honors the condition of CompleteMultipartUpload."""

    @pytest.fixture
    def store(self, localstack_s3):
        return limpet.open_store(f"{localstack_s3}/a/folder", part_size=8 << 20)


class TestHdfs(StoreContract):
    @pytest.fixture
    def store(self, hdfs):
        return limpet.open_store(f"{hdfs.url}/{uuid.uuid4().hex}/a")
