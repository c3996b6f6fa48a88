"""Where prices come from: AWS's price list, the dated table, or the user; spot prices; what is not
counted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.teardown_account import Account

from cloudddp.aws.client import AWS
from cloudddp.cluster import offers, prices

ROOT = Path(__file__).resolve().parents[2]
GENERATE = [sys.executable, str(ROOT / "infra/prices/generate.py")]
TABLE = "on-demand list price of 2026-07-20"


def source(account: Account, **settings: Any) -> str:
    """Return where the price of a cluster comes from."""
    found = offers.price(account.aws, account.spec(**settings))
    return f"${found.node_hour:.4g} ({found.source})"


def test_price_list_of_aws_is_preferred_if_it_has_one_price(account: Account) -> None:
    """GetProducts of the Pricing API, whose PriceList holds JSON texts (AWS Price List API reference). A
    capacity block is another product of the type."""

    def twice(body: bytes) -> bytes:
        answer = json.loads(body)
        answer["PriceList"] += [answer["PriceList"][0].replace("1.5000000000", "1.7000000000")]
        return json.dumps(answer).encode()

    account.conditions(prices={"g5.xlarge": 1.5})
    assert source(account) == "$1.5 (on-demand price of AWS, list of 2026-11-01)"
    assert account.faults.count("GetProducts") == 1
    for change in (
        twice,
        lambda _: b'{"PriceList": ["{\\"terms\\": [7]}"]}',
        lambda body: body.replace(b'\\"1.5', b'\\"0.0'),
    ):
        account.faults.rewrite("GetProducts", change)
        assert source(account) == f"$1.006 ({TABLE})"
    account.faults.rewrite("GetProducts", lambda body: body)
    account.conditions(reject={"GetProducts": {"code": "AccessDeniedException", "status": 400, "calls": 9}})
    assert source(account) == f"$1.006 ({TABLE})"


def test_given_price_needs_no_call(account: Account) -> None:
    assert source(account, price=9.0) == "$9 (as given)"
    assert "GetProducts" not in account.faults.calls


def test_every_region_has_prices(account: Account) -> None:
    found = offers.price(AWS(region="eu-west-1"), account.spec())
    assert (found.node_hour, found.source) == (1.123, "on-demand list price of 2026-01-21")


def test_current_spot_prices_are_shown_and_the_deadline_counts_the_upper_bound(
    cli: Any, conditions: Any
) -> None:
    """DescribeSpotPriceHistory with StartTime now answers the price of each zone that is valid now (EC2 API
    reference)."""
    del cli.env["CLOUDDDP_YES"]
    conditions(spot_prices={"us-east-1a": {"g5.xlarge": 0.41}, "us-east-1b": {"g5.xlarge": 0.47}})
    words = ("up", "-n", "2", "--spot", "--zones", "us-east-1a,us-east-1b", "--max-cost", "2.10")
    shown = cli(*words).stderr
    assert re.search(r"spot +now \$0\.41 to \$0\.47 per node", shown)
    assert "data transfer, snapshots and taxes are not counted" in " ".join(shown.split())
    assert re.search(r"price +spot, at most \$2\.\d\d an hour: \$1\.01 per node", shown)
    assert "in 59 min" in shown or "in 1 h 00 min" in shown
    refused = {"code": "UnauthorizedOperation", "status": 403, "calls": 9}
    conditions(reject={"DescribeSpotPriceHistory": refused})
    shown = cli(*words).stderr
    assert "price " in shown
    assert "now $" not in shown


# -- the table -----------------------------------------------------------------------------------------------


def test_table_has_every_region_with_sources_and_plausible_prices() -> None:
    table = json.loads(prices.TABLE.read_text())
    assert len(table["regions"]) >= 28
    for region, entry in table["regions"].items():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]), region
        assert min(entry["sources"].values()) == entry["date"], region
        assert all(0.3 < usd < 400 for usd in entry["types"].values()), region
    for name in ("g4dn.2xlarge", "g5.4xlarge", "g5.24xlarge", "g6.4xlarge", "g6e.4xlarge", "p5.48xlarge"):
        assert name in table["regions"]["us-east-1"]["types"]


def product(name: str, region: str, usd: str, unit: str = "Hrs") -> str:
    """Return one product as the price list has it."""
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}, "rateCode": "A.B.C"}
    attributes = {"instanceType": name, "regionCode": region, "operatingSystem": "Linux"}
    return json.dumps(
        {
            "product": {"attributes": attributes, "sku": "A"},
            "terms": {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": dimension}}}},
            "publicationDate": "2026-11-02T00:00:00Z",
        }
    )


def test_generator_compares_sources_and_prefers_the_newest(tmp_path: Path) -> None:
    """A region has the date of its oldest price."""
    vantage = tmp_path / "v.js"
    vantage.write_text(
        '// Last updated: 2026-01-21\nconst all = [{"apiName": "g5.xlarge", "pricing": {"us-east-1": '
        '{"onDemand": 1.0}, "us-east-1-atl-1": {"onDemand": 9.0}, "eu-west-1": {"onDemand": 1.1}}}];'
    )
    karpenter = tmp_path / "k.go"
    karpenter.write_text(
        '// generated at 2026-07-20T13:44:30Z for us-east-1\n"g5.xlarge": 1.006000, "g6.xlarge": 0.804800,\n'
    )
    answers = tmp_path / "answers"
    answers.mkdir()
    listed = [
        product("g5.xlarge", "us-east-1", "1.1"),
        product("g5.xlarge", "eu-north-1", "1.0670000000"),
        product("g5.xlarge", "us-gov-west-1", "1.3"),  # another partition
        product("m5.large", "eu-north-1", "0.1"),  # no GPU
        product("g4ad.xlarge", "eu-north-1", "0.4"),  # AMD
        product("p5.48xlarge", "eu-north-1", "0.0000000000"),  # a capacity block
        product("p4d.24xlarge", "eu-north-1", "24.0", unit="Quantity"),
    ]
    (answers / "page.json").write_text(json.dumps({"FormatVersion": "aws_v1", "PriceList": listed}))
    output = tmp_path / "table.json"
    flags = ["--vantage", vantage, "--karpenter", karpenter, "--answers", answers, "--output", output]
    done = subprocess.run([*GENERATE, *map(str, flags)], check=True, capture_output=True, text=True)
    assert "us-east-1 g5.xlarge: 1.0 and 1.006" in done.stderr
    regions = json.loads(output.read_text())["regions"]
    assert set(regions) == {"us-east-1", "eu-west-1", "eu-north-1"}
    assert regions["us-east-1"]["types"] == {"g5.xlarge": 1.1, "g6.xlarge": 0.8048}
    assert regions["us-east-1"]["date"] == "2026-07-20"
    assert set(regions["us-east-1"]["sources"]) == {"AWS Pricing API", "karpenter-provider-aws"}
    assert regions["eu-north-1"] == {
        "sources": {"AWS Pricing API": "2026-11-02"},
        "date": "2026-11-02",
        "gp3": 0.0836,
        "types": {"g5.xlarge": 1.067},
    }
