import pytest

from lamina.app.values import format_bytes, parse_bytes, parse_position, parse_tier, tier_name
from lamina.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1000", 1000),
        ("12B", 12),
        ("512M", 512 * 2**20),
        ("24g", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("24GB", 24 * 10**9),
        (" 2 kB ", 2000),
        ("1T", 2**40),
    ],
)
def test_bytes(text, expected):
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize("text", ["", "G", "0", "0.1", "-1G", "12iB", "1P", "1e9", "24 G free", "nan"])
def test_bad_bytes(text):
    with pytest.raises(ConfigError, match=r"--memory is .*24G"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (15.5 * 2**20, "15.5 MiB"), (2000 * 2**40, "2,000 TiB")],
)
def test_format_bytes(n_bytes, expected):
    assert format_bytes(n_bytes) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("2", (2, 2)), ("8", (8, 8)), ("k4v2", (4, 2)), ("K2V8", (2, 8)), ("k4v4", (4, 4))]
)
def test_tiers(text, expected):
    assert parse_tier(text) == expected
    assert parse_tier(tier_name(expected)) == expected


@pytest.mark.parametrize("text", ["", "3", "16", "k4", "v2k4", "k4v3", "4,2", "two"])
def test_bad_tiers(text):
    with pytest.raises(ConfigError, match="tier"):
        parse_tier(text)


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("123", 123), ("30%", 300), ("0.1 %", 1), ("100%", 1000)])
def test_positions(text, expected):
    assert parse_position(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "%", "ten", "5k"])
def test_bad_positions(text):
    with pytest.raises(ConfigError, match="position offset"):
        parse_position(text, 1000)
