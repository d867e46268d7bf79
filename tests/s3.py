"""An S3 server of this process, for tests of URLs: what is asked of it over HTTP is what a real one is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from upath import UPath

from kvshot_ds.files import location


@contextmanager
def bucket(name: str) -> Iterator[UPath]:
    """s3://<name> on a server of its own. Credentials and the endpoint stand in the environment, where child processes find them too."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # one that an earlier test made would ask that test's server
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        boto3.client("s3").create_bucket(Bucket=name)
        url = location(f"s3://{name}")
        assert isinstance(url, UPath)
        yield url
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
        server.stop()
