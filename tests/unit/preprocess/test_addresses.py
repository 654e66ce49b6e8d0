"""URL and address checks: every spelling of the advisories (robustness S1 to S4) is refused, ordinary ones are not."""

from __future__ import annotations

import httpx
import pytest

from triptych.services.preprocess.addresses import UrlRefused, is_public, parse_url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://example.com/a.png",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "//example.com/a.png",
        "example.com/a.png",
        "http:///a.png",
        "http:/a.png",
        "http://user@example.com/",
        "http://user:word@example.com/",
        "http://127.0.0.1\\@example.com/",
        "http://example.com\\.evil.com/",
        "http://exa mple.com/",
        "http://example.com/a\nHost: other",
        "http://example.com/a\r\n",
        "http://example.com/\x00",
        "\thttp://example.com/",
        "http://example.com/\x7f",
        "http://a%2fb.com/",
        "http://127.0.0.1%2f@example.com/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://example.com:port/",
        "http://[::1/",
        "http://0177.0.0.1/",
        "http://1.2.3.999/",
        "http://" + "a" * 9000 + ".com/",
    ],
)
def test_refused_urls(url: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        parse_url(url)
    assert "example" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        ("http://example.com", b"example.com", b"/"),
        ("HTTPS://EXAMPLE.com:444/a/b.png?x=1&y=%20#part", b"example.com", b"/a/b.png?x=1&y=%20"),
        ("http://例え.jp/é", b"xn--r8jz45g.jp", b"/%C3%A9"),
        ("http://[2606:4700::1111]:8080/", b"2606:4700::1111", b"/"),
        ("http://127。0。0。1/", b"127.0.0.1", b"/"),
    ],
)
def test_accepted_urls(url: str, host: bytes, target: bytes) -> None:
    parsed = parse_url(url)
    assert parsed.raw_host == host
    assert parsed.raw_path == target
    assert not parsed.fragment


def test_redirects_are_relative_to_where_they_come_from() -> None:
    base = httpx.URL("https://example.com/a/b?x")
    assert str(parse_url("c", base)) == "https://example.com/a/c"
    assert str(parse_url("//other.com/d", base)) == "https://other.com/d"
    with pytest.raises(UrlRefused):
        parse_url("file:///etc/passwd", base)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "0.1.2.3"),
        *("100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "198.18.0.1", "192.0.2.1", "203.0.113.9"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:7f00:1::"),
        *("2001:db8::1", "3fff::1", "100::1", "5f00::1", "4000::1", "example.com", "", "127.1", "2130706433", "0x7f.1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "151.101.1.69", "2606:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)
