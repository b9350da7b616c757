"""Options that no command can mean: not a number, endless, huge, negative, no digits at all."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from faulty import fixtures
from faulty.cases import Case
from faulty.commands import Asked, command_case
from sottovoce.base.seeds import stream

PLAN, OTHERS, NETWORK = "options of plan", "options of other commands", "options of keys, join and audit"
VALUES = (
    *("nan", "NaN", "inf", "-inf", "-1", "-2", "0", "1e308", "-1e308", "5e-324", "1e-9", "0.5", "1000000000"),
    *("10000000", "9223372036854775808", "9" * 30, "9" * 400, "x", "", "1e400", "٣", "1_0"),
)
DUE = {"nan", "NaN", "x", ""}  # whatever is asked for

SIZES = ("--population", "10000", "--cohort", "100", "--steps", "20", "--delta", "1e-6")
NOISE = (*SIZES, "--noise-multiplier", "1")
MECHANISM = ("--max-cohort", "100", "--steps", "20", "--delta", "1e-6", "--population", "10000")
PLANS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    NOISE: ("--population", "--cohort", "--steps", "--delta", "--noise-multiplier", "--parameters", "--clip-bound"),
    (*NOISE, "--scale", "10,100"): ("--scale",),
    (*SIZES, "--sigma-dp", "0.01"): ("--sigma-dp", "--cohort"),
    (*SIZES, "--target-epsilon", "8"): ("--target-epsilon", "--delta", "--steps"),
    (*NOISE, "--client-wers", "5", "--client-wer-noise", "10"): ("--client-wers", "--client-wer-noise"),
    (*NOISE, "--smallest-population", "--target-epsilon", "8", "--max-cohort", "1000"): (
        "--max-cohort",
        "--target-epsilon",
        "--noise-multiplier",
    ),
    **{
        (*MECHANISM, "--mechanism", kind, "--sigma-dp", "0.01"): (
            *("--max-cohort", "--steps", "--delta", "--population", "--sigma-dp", "--target-epsilon"),
        )
        for kind in ("auto", "independent", "banded", "blt")
    },
    (*MECHANISM, "--mechanism", "auto", "--target-epsilon", "8"): ("--target-epsilon", "--population"),
}


def plans(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    bases = list(PLANS)
    for number in range(count):
        rng = stream(seed, PLAN, number)
        base = bases[int(rng.integers(len(bases)))]
        option, value = (some[int(rng.integers(len(some)))] for some in (PLANS[base], VALUES))
        label = f"case {number}, {option} {value[:30]}"
        json = ("--json",) if rng.integers(2) else ()
        yield command_case(PLAN, label, Asked(("plan", *base, option, value, *json), folder), due=value in DUE)


SEARCH = ("--ctc-weight", "--temperature", "--end-threshold", "--longest-shift", "--beam-width", "--lm-weight")


def others(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    fixtures.build(folder)
    bases: dict[tuple[object, ...], tuple[str, ...]] = {
        ("stats", "store"): ("--speakers-per-device", "--seed"),
        ("stats", "store", "--table2"): ("--seed",),
        ("stats", "store", "--heterogeneity", "--embedding", "spectrum"): ("--users", "--utterances", "--seed"),
        ("tokens", "store", "--out", "pieces.json"): ("--size",),
        ("recipes",): ("--table", "--paper"),
        ("run", "demo-clipping/global"): ("--at-once", "--device"),
        ("prepare", "folder", "nothing", "--out", "out"): ("--workers", "--split"),
        ("probe", "models/ctc_transformer", "--on", "store:test"): ("--minutes", "--seed"),
        ("evaluate", "models/cpc", "--on", "store:test"): ("--longest",),
        **{
            ("transcribe", f"models/{name}", "sound.wav"): (*SEARCH, "--window", "--device")
            for name in ("ctc_transformer", "crdnn", "transducer")
        },
        **{
            ("evaluate", f"models/{name}", "--on", "store:test"): (*SEARCH, "--longest", "--word-score")
            for name in ("ctc_transformer", "crdnn", "transducer")
        },
    }
    names = list(bases)
    for number in range(count):
        rng = stream(seed, OTHERS, number)
        base = names[int(rng.integers(len(names)))]
        option, value = (some[int(rng.integers(len(some)))] for some in (bases[base], VALUES))
        label = f"case {number}, {option} {value[:30]}"
        yield command_case(OTHERS, label, Asked((*base, option, value), folder), due=value in DUE)


HOSTS = (
    *("https://a:99999", "https://a:0", "https://a:-1", "https://a:٣", "https://a", "https://:9443", "http://a:9443"),
    *("", "https://", "a b:9443", "https://a:9443/x", "https://a:" + "9" * 5_000, "https://a:9443x", "ftp://a:9443"),
)


def network(folder: Path, *, count: int, seed: int) -> Iterator[Case]:
    """Keys that hold for ever, addresses where nobody can be, quotas of nothing, audits without end."""
    fixtures.build(folder)
    join = ("--data", "store", "--key", "keys/node", "--ca", "keys/authority/ca.pem")
    keys = {
        ("keys", "authority"): "--days",
        ("keys", "server", "--authority", "keys/authority", "--host", "localhost"): "--days",
    }
    # Those that are too few or too many; what lies between would begin an audit.
    audits = [value for value in VALUES if value not in ("0.5", "1000", "1_0", "٣")]
    for number in range(count):
        rng = stream(seed, NETWORK, number)
        value = VALUES[int(rng.integers(len(VALUES)))]
        due = True
        match number % 6:
            case 0:
                base = list(keys)[int(rng.integers(2))]
                words: tuple[object, ...] = (*base, f"new-{number}", keys[base], value)
                due = value not in ("1_0", "٣")
            case 1:
                words = ("keys", "renew", "keys/server", "--authority", "keys/authority", "--days", value)
                due = value not in ("1_0", "٣")
            case 2:
                words = ("join", HOSTS[int(rng.integers(len(HOSTS)))], *join)
            case 3:
                option = ("--rounds-a-day", "--seconds-a-day", "--megabytes-a-day")[int(rng.integers(3))]
                words = ("join", "https://localhost:9443", *join, option, value)
                due = value in (*DUE, "inf", "-inf", "-1", "-2", "0", "-1e308", "1e400")
            case 4:
                option = ("--canaries", "--secrets")[int(rng.integers(2))]
                words = ("audit", "demo-clipping/global", option, audits[int(rng.integers(len(audits)))])
            case _:
                rounds = ("nan", "-1", "0", "x", "", "-2", "1e308")[int(rng.integers(7))]
                words = ("audit", "demo-clipping/global", "--rounds", rounds)
        yield command_case(NETWORK, f"case {number}", Asked(words, folder), due=due)
