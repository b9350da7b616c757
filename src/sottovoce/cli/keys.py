"""`sottovoce keys`: who signs what in a federation over a network."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.console import print_json, print_line, stdout
from sottovoce.cli.options import Json

app = typer.Typer(
    no_args_is_help=True,
    help="Make, show, renew and revoke keys: of a federation over a network, and of who signs models.",
)

New = Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")]
Folder = Annotated[Path, typer.Argument(help="A folder that `sottovoce keys` has made.")]
Authority = Annotated[Path, typer.Option(help="The authority's folder.")]


@app.command()
def authority(
    folder: New,
    days: Annotated[int | None, typer.Option(help="How long its certificate holds; ten years unless given.")] = None,
) -> None:
    """Make an authority: it signs servers' certificates. Keep its folder off the server.

    Example: sottovoce keys authority keys/authority
    """
    from sottovoce.network.keys import AUTHORITY, AUTHORITY_DAYS, make_authority

    make_authority(folder, now=datetime.now(UTC), days=AUTHORITY_DAYS if days is None else days)
    print_line(f"{folder}: an authority; give {folder / AUTHORITY} to everybody who joins", to=stdout)


@app.command()
def server(
    folder: New,
    authority: Authority,
    host: Annotated[list[str], typer.Option(help="A name or address that nodes reach the server by; may be repeated.")],
    days: Annotated[int | None, typer.Option(help="How long its certificates hold; a year unless given.")] = None,
) -> None:
    """Make a server's keys: for TLS, and for the orders that nodes follow.

    Example: sottovoce keys server keys/server --authority keys/authority --host voices.example.org
    """
    from sottovoce.network.keys import SERVER_DAYS, make_server

    make_server(
        folder, authority=authority, hosts=host, now=datetime.now(UTC), days=SERVER_DAYS if days is None else days
    )
    print_line(f"{folder}: a server's keys for {', '.join(host)}", to=stdout)


@app.command()
def node(
    folder: New,
    user: Annotated[str | None, typer.Option(help="Whose node it is; the roster's line then comes ready.")] = None,
) -> None:
    """Make a node's key. Its public line goes into the server's roster; the private one stays where it is.

    Example: sottovoce keys node keys/anna --user anna
    """
    from sottovoce.network.keys import NODE, load_public_key, make_node
    from sottovoce.network.roster import format_roster_entry

    make_node(folder)
    print_line(f"{folder}: a node's key; for the server's roster:", to=stdout)
    print_line(format_roster_entry(user or folder.name, load_public_key(folder / NODE)), to=stdout)


@app.command()
def signer(folder: New) -> None:
    """Make a key (Ed25519) that signs ledgers and exports: `run --sign`, `export --sign`, `verify --key`.

    Example: sottovoce keys signer keys/lab
    """
    from sottovoce.network.keys import SIGNER, make_signer

    fingerprint = make_signer(folder)
    print_line(f"{folder}: signs ledgers and exports; publish {folder / SIGNER}, or its fingerprint:", to=stdout)
    print_line(fingerprint, to=stdout)


@app.command()
def renew(
    folder: Folder,
    authority: Annotated[Path | None, typer.Option(help="The authority's folder; for a server's keys.")] = None,
    days: Annotated[int | None, typer.Option(help="How long the new certificates hold.")] = None,
) -> None:
    """Renew certificates for the same keys, or make a node a new key.

    Example: sottovoce keys renew keys/server --authority keys/authority
    """
    from sottovoce.network import keys

    print_line(keys.renew_keys(folder, now=datetime.now(UTC), authority=authority, days=days), to=stdout)


@app.command()
def revoke(
    node: Annotated[str, typer.Argument(help="A node's public key (its file) or its fingerprint.")],
    authority: Authority,
) -> None:
    """Put a node's key on the authority's list: a server that has the list asks it nothing any more.

    Example: sottovoce keys revoke keys/anna/node.pub --authority keys/authority
    """
    from sottovoce.network import keys

    name = keys.revoke_node(node, authority=authority)
    print_line(f"{authority / keys.REVOKED}: {name} is revoked; give the server the new list", to=stdout)


@app.command()
def show(folder: Folder, json: Json = False) -> None:
    """Show what a folder of keys holds: fingerprints, host names, how long; nothing secret.

    Example: sottovoce keys show keys/anna
    """
    from sottovoce.network.keys import describe_keys

    found = describe_keys(folder)
    if json:
        print_json(found)
        return
    for what, value in found.items():
        print_line(f"{what}: {value}", to=stdout)
