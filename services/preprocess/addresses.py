"""Which URLs and addresses media may be fetched from: parsed once, checked on what is then connected to. Pure.

The cases are those of the SSRF advisories against model servers: other spellings of loopback, addresses of cloud metadata
services, IPv4 inside IPv6, userinfo and backslashes that two parsers read differently.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import httpx

MAX_URL_LENGTH = 8192  # chosen: what common servers take
_SCHEMES = ("http", "https")
_DENIED_V4 = (
    ip_network("192.0.0.0/24"),  # IETF protocol assignments; partly "global" for Python, and a metadata service lives there
    ip_network("168.63.129.16/32"),  # a public address that is a cloud's internal metadata service
)
_UNICAST_V6 = IPv6Network("2000::/3")  # all that IANA has given out for global unicast
_NAT64 = IPv6Network("64:ff9b::/96")  # the IPv4 address is in the last 32 bits (RFC 6052)
_DENIED_V6 = (
    ip_network("2001::/23"),  # IETF protocol assignments, Teredo among them
    ip_network("2001:db8::/32"),  # documentation
    ip_network("2002::/16"),  # 6to4: holds an IPv4 address
    ip_network("3fff::/20"),  # documentation
)


class UrlRefused(ValueError):
    """Not a URL that we fetch. The text is safe to show."""


def parse_url(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """The one parse of a URL, or of a redirect's location relative to `base`; what is returned is what is fetched.

    Raises:
        UrlRefused: not http(s), or a form that parsers disagree about.
    """
    if len(url) > MAX_URL_LENGTH:
        raise UrlRefused("the image URL is too long")
    if any(character <= " " or character in "\\\x7f" for character in url):
        raise UrlRefused("the image URL has spaces, control characters or backslashes in it: percent-encode them")
    try:
        parsed = httpx.URL(url) if base is None else base.join(url)
    except (httpx.InvalidURL, ValueError):
        raise UrlRefused("the image URL is not valid") from None
    if parsed.scheme not in _SCHEMES:
        raise UrlRefused("the image URL must be http, https or data")
    if parsed.userinfo:
        raise UrlRefused("the image URL must not hold a user name")
    if not parsed.raw_host or b"%" in parsed.raw_host:
        raise UrlRefused("the image URL has no valid host")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise UrlRefused("the image URL has no valid port")
    return parsed.copy_with(fragment=None)


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet. False when in doubt."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        inside = ip.ipv4_mapped or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        if inside is None:
            return ip in _UNICAST_V6 and ip.is_global and not any(ip in network for network in _DENIED_V6)
        ip = inside
    return ip.is_global and not (ip.is_multicast or ip.is_reserved) and not any(ip in network for network in _DENIED_V4)
