from __future__ import annotations

import pytest

from raysgd._secrets import has_secret, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "s3://AKIA:s%2Fcret@bucket/a?access_key=one&region=x&secret_key=two&session_token=three&sas_token=4",
            "s3://***@bucket/a?access_key=***&region=x&secret_key=***&session_token=***&sas_token=***",
        ),
        ("s3://AKIA:s/cr+et==@bucket/a", "s3://***@bucket/a"),
        (
            "could not open 's3://id:secret@a/b?token=c', nor `gs://d?secret_key=e`: http://id:f@host:80/g",
            "could not open 's3://***@a/b?token=***', nor `gs://d?secret_key=***`: http://***@host:80/g",
        ),
    ],
)
def test_no_secret_is_shown(text: str, shown: str) -> None:
    assert masked(text) == masked(shown) == shown
    assert has_secret(text)


@pytest.mark.parametrize(
    "text",
    [
        "abfs://container@account/a",
        "/mnt/key=3",
        "s3://bucket/10:30/run@2",
        "http://host:9000/me@2",
        "at 10:30: me@host",
    ],
)
def test_everything_else_is(text: str) -> None:
    assert masked(text) == text
    assert not has_secret(text)
