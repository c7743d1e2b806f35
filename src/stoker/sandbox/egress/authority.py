"""A certificate authority for one action: trusted by its box alone, gone with it.

The box is told to trust it, the proxy gets a certificate for each host whose credential it puts in
place. The authority's own key never leaves this object. Needs the extra ``credentials``, so it is
imported only by what has one to serve.
"""

import datetime as dt
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_LIFE = dt.timedelta(days=2)
_BEFORE = dt.timedelta(hours=1)
"""A box's clock may be a little behind."""
_NAME_MAX = 64
"""Longest common name."""


class Authority:
    """One authority; ``now`` is the wall time its certificates are dated by."""

    def __init__(self, now: dt.datetime) -> None:
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _named("stoker box authority")
        unsigned = self._begun(name, name, self._key.public_key(), authority=True)
        self._certificate = unsigned.sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """What the box is to trust, PEM."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, host: str) -> bytes:
        """Return key and certificate for ``host``, PEM in one."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate.subject
        unsigned = self._begun(_named(host), issuer, key.public_key(), authority=False)
        names = x509.SubjectAlternativeName([_general_name(host)])
        signed = unsigned.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + signed.public_bytes(Encoding.PEM)

    def _begun(
        self,
        subject: x509.Name,
        issuer: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *,
        authority: bool,
    ) -> x509.CertificateBuilder:
        of_key = x509.SubjectKeyIdentifier.from_public_key(key)
        of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _BEFORE)
            .not_valid_after(self._now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(_usage(authority=authority), critical=True)
            .add_extension(of_key, critical=False)
            .add_extension(of_issuer, critical=False)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:_NAME_MAX])])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
