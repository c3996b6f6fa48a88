"""This computer's files of a cluster that is removed: the journal and the keys."""

from __future__ import annotations

from support.teardown_account import Account, folder_of, ids, journal

from cloudddp.local_state import ClusterFolder


def test_removal_is_journalled_and_the_keys_are_removed(account: Account) -> None:
    folder, nodes = folder_of(account), account.launch(2)
    account.down()
    first, last = journal(folder)
    assert (first["event"], sorted(first["ids"])) == ("terminate", sorted(nodes))
    assert last["event"] == "gone"
    assert not folder.private_key.exists()


def test_each_journal_lists_its_own_instances(account: Account) -> None:
    """Two clusters of one name, as an earlier version could create them, and an instance with no valid id."""
    second = "c-ffffffff00"
    folders = [folder_of(account), folder_of(account, second)]
    (one,) = account.launch()
    (two,) = account.launch(tags={"cloudddp:cluster": account.name, "cloudddp:cluster-id": second})
    (three,) = account.launch(tags={"cloudddp:cluster": account.name, "cloudddp:cluster-id": "../../x"})
    report = account.down()
    assert sorted(ids(report.terminated)) == sorted([one, two, three])
    assert [journal(folder)[0]["ids"] for folder in folders] == [[one], [two]]
    assert not any(folder.private_key.exists() for folder in folders)
    assert len(list(folders[0].path.parent.iterdir())) == 2


def test_cluster_of_another_computer_gets_no_folder(account: Account) -> None:
    account.launch()
    account.down()
    assert not ClusterFolder(account.cluster_id).exists


def test_keys_stay_while_something_is_left(account: Account) -> None:
    """Or the cluster is being created."""
    folder = folder_of(account)
    account.group()
    with folder.being_created():
        account.down()
    assert folder.private_key.exists()
    account.group()
    account.faults.fail("DeleteSecurityGroup", "UnauthorizedOperation", times=9, status=403)
    assert account.down().left
    assert folder.private_key.exists()
    account.faults.clear()
    account.down()
    assert not folder.private_key.exists()


def test_keys_of_other_clusters_stay(account: Account) -> None:
    """The tag of a key pair may hold the id of another cluster: of another region, or with live nodes."""
    away = [folder_of(account, f"c-eeeeeeee{k:02x}", region="us-west-2") for k in range(2)]
    live = [folder_of(account, f"c-cccccccc{k:02x}") for k in range(2)]
    for folder in live:
        account.launch(tags={"cloudddp:cluster": "another", "cloudddp:cluster-id": folder.id})
    free = [folder_of(account, f"c-dddddddd{k:02x}") for k in range(2)]
    for folder in (*away, *live, *free):
        account.key(**{"cloudddp:cluster": account.name, "cloudddp:cluster-id": folder.id})
    account.down()
    assert all(folder.private_key.exists() for folder in (*away, *live))
    assert not any(folder.private_key.exists() for folder in free)
