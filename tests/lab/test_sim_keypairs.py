"""Key pairs: unique names, also for concurrent requests, and deletion by name or id."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError
from support.account import Account, refused

from cloudddp.ssh.target import generate_key


@pytest.fixture(scope="module")
def public() -> bytes:
    return generate_key().public.encode()


def test_concurrent_imports_of_one_name(remote: Account, public: bytes) -> None:
    ec2 = remote.ec2

    def attempt(_: int) -> str:
        try:
            return str(ec2.import_key_pair(KeyName="race", PublicKeyMaterial=public)["KeyPairId"])
        except ClientError as error:
            return str(error.response["Error"]["Code"])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(attempt, range(16)))
    assert answers.count("InvalidKeyPair.Duplicate") == 15
    (made,) = [answer for answer in answers if answer.startswith("key-")]
    ec2.delete_key_pair(KeyPairId=made)


def test_key_pairs_are_deleted_by_name_or_id(account: Account, public: bytes) -> None:
    """An old id does not delete a new pair of the same name."""
    ec2 = account.ec2
    old, _ = (
        ec2.import_key_pair(KeyName=name, PublicKeyMaterial=public)["KeyPairId"] for name in ("one", "two")
    )
    answer = ec2.delete_key_pair(KeyPairId=old)
    assert (answer["Return"], answer["KeyPairId"]) == (True, old)
    assert [pair["KeyName"] for pair in ec2.describe_key_pairs()["KeyPairs"]] == ["two"]
    ec2.import_key_pair(KeyName="one", PublicKeyMaterial=public)
    with refused("InvalidKeyPair.NotFound"):
        ec2.delete_key_pair(KeyPairId=old)
    ec2.delete_key_pair(KeyName="two")
    assert [pair["KeyName"] for pair in ec2.describe_key_pairs()["KeyPairs"]] == ["one"]
    ec2.delete_key_pair(KeyName="never-was")  # no error on EC2 either
    with refused("MissingParameter"):
        ec2.delete_key_pair()
