"""A node's home: the folder that `join` writes, how it is recognised, and what its owner may set in it.

HOME/node.json       says that this is a node's home, and in which version of its layout
HOME/ledger.jsonl    what was accepted and sent (`ledger`)
HOME/personal        one's own part of the model, where that was asked for (`personal`)
HOME/paused          while it is there, nothing is answered; `left`: nor ever again

Pausing and leaving are refused, and write nothing, where no node is. Homes of older releases have no `node.json`; they
are known by their ledger.
"""

from pathlib import Path

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_bounded, sync_folder, write_json
from sottovoce.base.parsing import ParseError, parse_json, quote
from sottovoce.privacy.chain import read_chain

MARK, LEDGER, PAUSED, LEFT = "node.json", "ledger.jsonl", "paused", "left"

_FORMAT, _VERSION = "sottovoce node home", 1
_LARGEST_MARK = 1 << 12
_RECORDS = ("accepted", "answered", "ended")  # kinds of lines in a node's ledger
_OLD_NAMES = {LEDGER, PAUSED, LEFT, "start", "speech"}  # what older releases wrote into a home


def claim_home(home: Path) -> None:
    """Make `home` a node's, for its owner alone; InputError where it is another version's, or has another ledger."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_marked(home):
        if (home / LEDGER).exists() and not _begins_as_node_ledger(home):
            raise InputError(f"{home / LEDGER} line 1 is no record of this release: expected a node's ledger, or none")
        write_json(home / MARK, {"format": _FORMAT, "version": _VERSION})


def check_home(home: Path) -> None:
    """InputError unless `home` is a node's: by its mark or, where that is missing or damaged, by its ledger."""
    if home.is_file():
        raise InputError(f"{home} is a file: expected the home of a node, KEY/home unless it was moved")
    if _is_home(home):
        return
    inside = home / "home"
    expected = f"expected {inside}" if _is_home(inside) else "expected the home of one"
    raise InputError(f"{home}: no node has joined from here; {expected}, KEY/home unless it was moved")


def _is_home(home: Path) -> bool:
    return _is_marked(home) or _has_node_ledger(home)


def _is_marked(home: Path) -> bool:
    if not (home / MARK).is_file():
        return False
    try:
        found = parse_json(read_bounded(home / MARK, most=_LARGEST_MARK, what="the mark of a home"))
    except (ParseError, UnicodeDecodeError):
        return False
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        return False
    if found.get("version") != _VERSION:
        raise InputError(
            f"{home} was made by another release of sottovoce (version {quote(found.get('version'))} of a node's home, "
            f"this one knows {_VERSION}): use that release"
        )
    return True


def _has_node_ledger(home: Path) -> bool:
    """Whether a node's ledger is there; an empty one counts among nothing but a node's files."""
    if not (home / LEDGER).is_file() or not _begins_as_node_ledger(home):
        return False
    return (home / LEDGER).stat().st_size > 0 or {inside.name for inside in home.iterdir()} <= _OLD_NAMES | {MARK}


def _begins_as_node_ledger(home: Path) -> bool:
    """Whether the ledger in `home` begins with a node's record, or has none yet; InputError where it is damaged."""
    records = read_chain(home / LEDGER).records
    return not records or any(kind in records[0] for kind in _RECORDS)


# What its owner sets, also while its node is running.


def participation_status(home: Path) -> str:
    if (home / LEFT).exists():
        return "left for good"
    return "paused" if (home / PAUSED).exists() else "taking part"


def pause_node(home: Path) -> None:
    """Answer nothing until `resume_node`."""
    _check_not_left(home)
    (home / PAUSED).touch()
    sync_folder(home)


def resume_node(home: Path) -> None:
    _check_not_left(home)
    (home / PAUSED).unlink(missing_ok=True)
    sync_folder(home)


def leave_federation(home: Path) -> None:
    """Answer nothing any more, for good: taking part again needs a new key in a new run."""
    check_home(home)
    (home / LEFT).touch()
    sync_folder(home)


def _check_not_left(home: Path) -> None:
    check_home(home)
    if (home / LEFT).exists():
        raise InputError(f"{home}: this node has left for good; taking part again needs a new key, and a new run")
