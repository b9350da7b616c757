"""X.509 certificates of an authority, of a server under its host names, and of the key that signs its orders."""

import ipaddress
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sottovoce.base.errors import InputError
from sottovoce.base.signatures import PrivateKey, PublicKey

SIGNS_ORDERS = x509.ObjectIdentifier("2.25.281913087194356122098765409115022731001")  # made of a random UUID

WARN_BEFORE = timedelta(days=30)  # that a certificate expires

_CLOCKS_DIFFER = timedelta(hours=1)  # a certificate holds from so long before it was made
_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.IGNORECASE)
_LONGEST_HOST = 253
MOST_DAYS = 36_500  # a hundred years

Host = x509.DNSName | x509.IPAddress


def self_signed(key: PrivateKey, *, now: datetime, days: int) -> x509.Certificate:
    """An authority's own certificate."""
    name = _common_name("sottovoce authority")
    built = _builder(key.public_key(), subject=name, issuer=name, is_authority=True, now=now, days=days)
    return built.sign(key, SHA384())


def issued(
    key: PublicKey,
    issuer: x509.Certificate,
    signer: PrivateKey,
    *,
    hosts: Sequence[Host] | None,
    now: datetime,
    days: int,
) -> x509.Certificate:
    """A certificate for TLS under `hosts`, or without any for signing orders."""
    for_tls = hosts is not None
    name = _common_name("sottovoce server" if for_tls else "sottovoce orders")
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH if for_tls else SIGNS_ORDERS])
    built = (
        _builder(key, subject=name, issuer=issuer.subject, is_authority=False, now=now, days=days)
        .add_extension(usage, critical=not for_tls)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if now + timedelta(days=days) > issuer.not_valid_after_utc:
        raise InputError(
            f"days={days}: the authority's own certificate ends on {issuer.not_valid_after_utc:%Y-%m-%d}: "
            "renew it first, or take fewer"
        )
    if hosts is not None:
        built = built.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return built.sign(signer, SHA384())


def _builder(
    key: PublicKey, *, subject: x509.Name, issuer: x509.Name, is_authority: bool, now: datetime, days: int
) -> x509.CertificateBuilder:
    if not 1 <= days <= MOST_DAYS:
        raise InputError(f"days={days}: expected 1 to {MOST_DAYS:,}")
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    built = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _CLOCKS_DIFFER,
        not_valid_after=now + timedelta(days=days),
    )
    return (
        built.add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
        )
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def host_names(hosts: Sequence[str]) -> list[Host]:
    """Names and addresses as certificates hold them.

    >>> [host.value for host in host_names(["voices.example.org", "127.0.0.1"])]
    ['voices.example.org', IPv4Address('127.0.0.1')]
    """
    if not hosts:
        raise InputError("a server's certificate names its hosts: expected at least one, such as localhost")
    return [_host(host) for host in dict.fromkeys(hosts)]


def _host(text: str) -> Host:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if len(text) > _LONGEST_HOST or not _HOST.fullmatch(text):
        raise InputError(f"host={text!r}: expected a host name or an address, without scheme or port")
    return x509.DNSName(text.lower())


def hosts_of(certificate: x509.Certificate) -> list[Host]:
    """The hosts that a certificate of ours names."""
    try:
        named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        raise InputError("the server's certificate names no hosts: make the server's keys anew") from None
    return [host for host in named if isinstance(host, x509.DNSName | x509.IPAddress)]


def as_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def parse_certificate(content: bytes, *, where: str) -> x509.Certificate:
    """The first certificate in `content`."""
    try:
        return x509.load_pem_x509_certificate(content)
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{where} holds no certificate that can be read: expected PEM") from None


def check_valid(certificate: x509.Certificate, *, name: str, now: datetime, remedy: str) -> str | None:
    """InputError unless `certificate` is valid; within thirty days of its end, a line that says when and what to do."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise InputError(
            f"{name} is not valid before {begin:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{now:%Y-%m-%d %H:%M}: set the clock"
        )
    if now > end:
        raise InputError(
            f"{name} has expired on {end:%Y-%m-%d}, and this machine's clock says {now:%Y-%m-%d}: {remedy}"
        )
    if end - now > WARN_BEFORE:
        return None
    return f"{name} expires on {end:%Y-%m-%d}, {(end - now).days} days from now: {remedy}"


def order_signing_key(certificate: x509.Certificate, *, authority: x509.Certificate, now: datetime) -> PublicKey:
    """The key whose orders count; InputError where `authority` has not signed it for that, or its time is over."""
    try:
        certificate.verify_directly_issued_by(authority)
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise InputError("the server's orders are not signed under the authority that was given") from None
    if list(usage) != [SIGNS_ORDERS]:
        raise InputError("the server signs orders with a certificate that is not for that")
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= now <= end:
        raise InputError(
            f"the server's certificate holds from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and this machine's clock says "
            f"{now:%Y-%m-%d}: set the clock, or have the certificate renewed"
        )
    key = certificate.public_key()
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise InputError("the server signs orders with a key of another kind: expected ECDSA P-384")
    return key
