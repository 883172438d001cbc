"""Makes what a deployment with TLS and node authentication needs: certificates and node keys.

    python certificates.py FOLDER --host superlink.example.org --nodes 10

writes ca.crt, server.crt and server.key for the server, and node-0, node-0.pub, ... for the
SuperNodes. The certificate is good for the loopback interface too. What is there already is kept.
The authority's own key is not: for another host, remove ca.crt, server.crt and server.key, run this
again, and give all nodes the new ca.crt. Nodes can be added at any time; `--first` says where their
numbers begin.
"""

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: list[str], days: int = 365) -> None:
    """Write `ca.crt`, `server.crt` and `server.key` for a SuperLink with these names."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), _new_key()
    ca_name, server_name = _name("torchpisa example authority"), _name(hosts[0])
    ca = (
        _builder(ca_name, ca_name, authority, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA384())
    )
    certificate = (
        _builder(server_name, ca_name, server, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(authority, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.crt").write_bytes(certificate.public_bytes(pem))
    _write_secret(
        folder / "server.key",
        server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def hosts_of(folder: Path) -> list[str]:
    """The names that a server's certificate is for."""
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def make_node_key(file: Path) -> None:
    """Write a SuperNode's private key, and its public key with `.pub` behind the name."""
    key = _new_key()
    _write_secret(
        file,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
    )
    file.with_name(file.name + ".pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )


def _new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _write_secret(file: Path, content: bytes) -> None:
    # Never readable by others, not even for a moment, and never over a key that is in use.
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: int):
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", action="append", default=[], help="name or address of the server")
    parser.add_argument("--nodes", type=int, default=0, help="number of node keys")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (folder / "ca.crt").exists():
        print(f"kept: {folder}/ca.crt, server.crt, server.key, for {', '.join(hosts_of(folder))}")
    else:
        make_certificates(folder, [*dict.fromkeys([*arguments.host, "localhost", "127.0.0.1"])])
        print(f"made: {folder}/ca.crt, server.crt, server.key, for {', '.join(hosts_of(folder))}")
    for number in range(arguments.first, arguments.first + arguments.nodes):
        key = folder / f"node-{number}"
        if key.exists():
            print(f"kept: {key}; --first says where the numbers of further nodes begin")
        else:
            make_node_key(key)
            print(f"made: {key}, {key}.pub")


if __name__ == "__main__":
    main()
