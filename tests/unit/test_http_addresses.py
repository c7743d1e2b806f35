"""Addresses of servers: which are refused, and which mean the same server."""

import pytest

from stoker.errors import ConfigInvalid
from stoker.inference.http.addresses import server_name, servers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://LOCALHOST:8000/", "http://[::1]:8000"),
        ("http://0.0.0.0:8000", "http://model.localhost:8000"),
        ("http://Trainer.example", "http://trainer.example:80"),
        ("https://trainer.example/a/", "https://trainer.example:443/a"),
    ],
)
def test_two_names_of_one_server_are_one(one: str, other: str) -> None:
    assert server_name(one) == server_name(other)
    with pytest.raises(ConfigInvalid, match="twice"):
        servers(f"{one},{other}")


def test_other_ports_paths_schemes_and_hosts_are_other_servers() -> None:
    urls = (
        "http://localhost:8000",
        "http://localhost:8001",
        "http://trainer.example:8000",
        "https://trainer.example:8000",
        "http://trainer.example:8000/second",
    )
    assert servers(",".join(urls)) == urls
    assert len({server_name(url) for url in urls}) == len(urls)


def test_a_loopback_is_named_by_the_machine_it_is_of() -> None:
    name = server_name("http://127.0.0.1:8000")
    assert "127.0.0.1" not in name, "on another machine it would mean another server"
    assert name == server_name("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "text", ["http://", "ftp://a:1", "a:8000", "http://a:b", "http://[::1", ""]
)
def test_what_is_no_address_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="no address of a server"):
        servers(text)
