"""Key pairs: unique names, also for concurrent requests, and deletion by name or id."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from cloudddp.ssh.target import generate_key


@pytest.fixture(scope="module")
def public() -> bytes:
    return generate_key().public.encode()


def names(ec2: Any) -> list[str]:
    return [pair["KeyName"] for pair in ec2.describe_key_pairs()["KeyPairs"]]


def test_concurrent_imports_of_one_name(ec2: Any, public: bytes) -> None:
    def attempt(_: int) -> str:
        try:
            return str(ec2.import_key_pair(KeyName="race", PublicKeyMaterial=public)["KeyPairId"])
        except ClientError as error:
            return str(error.response["Error"]["Code"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(attempt, range(32)))
    assert answers.count("InvalidKeyPair.Duplicate") == 31
    (made,) = [answer for answer in answers if answer.startswith("key-")]
    ec2.delete_key_pair(KeyPairId=made)


def test_delete_by_id(ec2: Any, public: bytes) -> None:
    first, _ = (
        ec2.import_key_pair(KeyName=name, PublicKeyMaterial=public)["KeyPairId"] for name in ("one", "two")
    )
    answer = ec2.delete_key_pair(KeyPairId=first)
    assert (answer["Return"], answer["KeyPairId"]) == (True, first)
    assert "one" not in names(ec2)
    assert "two" in names(ec2)
    ec2.delete_key_pair(KeyName="two")
    assert "two" not in names(ec2)


def test_old_id_does_not_delete_a_new_pair(ec2: Any, public: bytes) -> None:
    old = ec2.import_key_pair(KeyName="again", PublicKeyMaterial=public)["KeyPairId"]
    ec2.delete_key_pair(KeyPairId=old)
    new = ec2.import_key_pair(KeyName="again", PublicKeyMaterial=public)["KeyPairId"]
    with pytest.raises(ClientError, match=r"InvalidKeyPair\.NotFound"):
        ec2.delete_key_pair(KeyPairId=old)
    assert "again" in names(ec2)
    ec2.delete_key_pair(KeyPairId=new)


def test_delete_unknown_pair(ec2: Any) -> None:
    ec2.delete_key_pair(KeyName="never-was")  # no error on EC2 either
    with pytest.raises(ClientError, match="MissingParameter"):
        ec2.delete_key_pair()
