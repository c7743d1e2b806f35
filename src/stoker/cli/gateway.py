"""``stoker gateway``: a ledger for other machines, in the foreground."""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import ConfigOption, SetOption
from stoker.cli.output import remarks

if TYPE_CHECKING:
    from stoker.broker.network import Address
    from stoker.broker.relay import Relay
    from stoker.broker.spawn import OwnerSettings


def gateway(
    directory: Annotated[
        Path | None, typer.Option("--directory", metavar="DIR", help="Place of its own: lock, log.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Key that all machines hold.")
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen.")
    ] = "127.0.0.1:7431",
    new_key: Annotated[
        Path | None, typer.Option("--new-key", metavar="FILE", help="Make a key and end.")
    ] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Serve a ledger to other machines until Ctrl-C.

    Listens for TLS connections from whoever holds the key, and for nobody else.
    With ledger.url it is a gateway to that database, and any number may serve
    it; without, it serves the ledger file in --directory. Runs name gateways in
    ledger.gateways and the key in ledger.gateway_key.

    Examples:
      stoker gateway --new-key team.pem
      stoker gateway --directory serving --key team.pem --config stoker.toml
      stoker gateway --directory serving --key team.pem --listen 10.0.0.7:7431

    Exit codes:
      0    Ctrl-C; the ledger lives on
      1    it broke; the ledger lives on
      2    key, address, settings or database cannot be used; nothing was started
      130  interrupted before it had begun
    """
    from stoker.broker.network import parse_address
    from stoker.broker.place import check_directory
    from stoker.broker.relay import Relay
    from stoker.broker.spawn import make_key
    from stoker.errors import ConfigInvalid

    if new_key is not None:
        make_key(new_key)
        remarks().print(f"made {new_key}; copy it to every machine, readable by you alone")
        return
    if key is None or directory is None:
        raise ConfigInvalid(
            "a gateway needs --directory and --key, the file that every machine holds; nothing "
            "was started; make one with `stoker gateway --new-key FILE`"
        )
    check_directory(directory)
    relay = Relay(directory.absolute(), _settings(config, sets))
    asyncio.run(_serve(relay, parse_address(listen), key))


def _settings(config: list[Path] | None, sets: list[str] | None) -> "OwnerSettings":
    from stoker.broker.base import Durability
    from stoker.broker.limits import database_of, limits_of
    from stoker.broker.spawn import OwnerSettings
    from stoker.config.load import load_settings, process_environment

    settings = load_settings(config or [], process_environment(), sets or []).settings
    return OwnerSettings(
        limits=limits_of(settings.ledger, settings.workers, settings.services),
        durability=Durability(settings.ledger.durability),
        idle_exit_seconds=settings.ledger.idle_exit,
        database=database_of(settings.ledger),
    )


async def _serve(relay: "Relay", address: "Address", key: Path) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    remarks().print(f"listening on {await relay.open(address, key)}")
    await ended.wait()
    await relay.close()
