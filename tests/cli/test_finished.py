"""What a command says of runs that are done: which one to use, recordings before and after, what binds, stage times."""

from pathlib import Path
from typing import Any

from sottovoce.cli.finished import choose_run_to_use, explain_useless_run, list_next_commands, quote_transcripts
from sottovoce.cli.stage_times import StageTimes
from sottovoce.training.run_context import Outcome


def samples(*hypotheses: str) -> list[dict[str, str]]:
    return [{"reference": f"text {n}", "hypothesis": text} for n, text in enumerate(hypotheses)]


def people(*errors: int) -> list[dict[str, Any]]:
    return [{"speaker": f"s{n}", "words": 10, "wer": wrong / 10} for n, wrong in enumerate(errors)]


def outcome(epsilon: float | None, **test: Any) -> Outcome:
    before = {"wer": 0.5, "per_speaker": people(5, 6, 4, 5, 6, 4), "samples": samples("a", "", "c", "d")}
    after = {"wer": 0.5, "per_speaker": people(6, 5, 5, 4, 5, 5), "samples": samples("w", "x", "y", "z")}
    privacy = {"simulated": True, "epsilon_rdp": epsilon, "noise_multiplier": 2.92, "cohort_size": 33, "steps": 20}
    results = {
        "test": {"test": after | test},
        "start": {"test": {"test": before}},
        "privacy": privacy,
        "communication": {"trained_parameters": 554_718},
    }
    return Outcome(Path("runs/mine"), results=results)


def test_the_first_run_with_a_guarantee_is_the_one_to_use() -> None:
    quiet, private = outcome(None), outcome(8.0)
    assert choose_run_to_use({"a": quiet, "b": private, "c": quiet, "d": private}) == "b"
    assert choose_run_to_use({"a": quiet, "c": quiet}) == "c"
    assert list_next_commands(private) == [
        "to verify what it promises: sottovoce export runs/mine --out models/mine && sottovoce verify models/mine",
        "to use it: sottovoce transcribe runs/mine FILE",
    ]
    release, *_ = list_next_commands(private, again="sottovoce run mine")
    assert release.endswith(": sottovoce run mine federation.privacy.mode=secure --out runs/mine-release")
    assert private.results is not None
    late = {**private.results["privacy"], "expected_answers": 30}
    (release, *_) = list_next_commands(
        Outcome(private.folder, results={**private.results, "privacy": late}), again="sottovoce run mine"
    )
    assert ": sottovoce serve mine federation.privacy.mode=secure --roster " in release  # `run` would refuse it
    private.results["privacy"]["simulated"] = False
    assert len(list_next_commands(private, again="sottovoce run mine")) == 2
    assert list_next_commands(quiet) == ["to use it: sottovoce transcribe runs/mine FILE"]


def test_three_recordings_are_shown_before_and_after_where_a_run_quotes_any() -> None:
    table = quote_transcripts("private", outcome(8.0))
    assert table is not None
    names = [name for name, _ in table.rows]
    assert names == ["said", "before federation", "private"] * 3
    assert [text for _, text in table.rows] == ["text 0", "a", "w", "text 1", "–", "x", "text 2", "c", "y"]
    assert table.groups == (3, 6)
    real = outcome(8.0)
    assert real.results is not None
    del real.results["test"]["test"]["samples"]
    assert quote_transcripts("private", real) is None


def test_a_run_that_has_not_learned_says_what_binds_and_what_helps() -> None:
    first, *lines = explain_useless_run(outcome(8.0))
    assert first == "It is not shown to be better than the model it started from."
    assert "66 times as long" in lines[0]
    assert any("clients a round in place of 33" in line for line in lines)
    assert explain_useless_run(outcome(8.0, per_speaker=people(0, 1, 0, 1, 0, 1))) == []
    assert explain_useless_run(outcome(None)) == []


def test_stages_of_one_title_are_added_up_and_short_ones_are_others() -> None:
    now = [0.0]
    times = StageTimes(clock=lambda: now[0])
    for title, seconds in (("speech", 1.0), ("seed", 30.0), ("rounds", 50.0), ("testing", 5.0), ("rounds", 40.0)):
        now[0] += seconds  # of the stage before
        times.begin(title)
    now[0] += 75.0
    # 1 s before the first stage, and one stage of 1 s in 201 s.
    assert times.format() == "took 3.4 min: speech 30 s, seed 50 s, rounds 80 s, testing 40 s, others 1 s"
