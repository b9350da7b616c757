"""An invitation as sentences that a person can accept or refuse."""

from dataclasses import replace

from sottovoce.models.base_files import BaseModelName
from sottovoce.network.client_recipe import base_model_of
from sottovoce.network.invitation import Invitation
from sottovoce.network.secure_sum.words import epsilon_for_server
from sottovoce.privacy.accounting import epsilon
from sottovoce.privacy.events import CorrelatedRelease, Event, poisson_release, repeated
from sottovoce.privacy.guarantee import format_epsilons
from sottovoce.privacy.membership_odds import strength_of
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import draw_rate
from sottovoce.privacy.settings import Mode, PrivacySettings, Weighting


def describe_invitation(invitation: Invitation) -> list[str]:
    """What a person is asked, a sentence or two each. All of it follows from what the digest covers."""
    recipe, private, plan = invitation.recipe, invitation.private, invitation.outline
    settings, local = recipe.federated, recipe.federated.local
    amount = (
        f"{local.local_steps} local steps" if local.local_steps else f"{local.local_epochs} passes over your speech"
    )
    megabytes = invitation.length * invitation.sum_bits / 8e6
    base = base_model_of(recipe)
    part = settings.trainable or (base.trained if base is not None else "all of it")
    return [
        f"What is trained: a model of family {recipe.model.family}, {part} "
        f"({invitation.length:,} parameters), on your recordings{' and their texts' if recipe.reads_texts else ''}, on "
        "this machine.",
        *([] if base is None else [_base_model(base, invitation)]),
        f"Each time: {amount}, with at most {local.batch_seconds:g} s of speech at once, learning rate {local.lr:g}"
        f"{', from a model that comes with 16 bits a number' if settings.model_bits == 16 else ''}"
        f"{_given_up(settings.training_seconds)}.",
        f"What leaves this machine: one update of {invitation.length:,} numbers ({megabytes:,.2f} MB), never longer "
        f"than {private.clip_bound:g} (the clip bound), rounded to multiples of {plan.grid:.3g}. No recordings, texts, "
        "losses, counts or error messages.",
        *_weighting(private),
        _visibility(invitation),
        _noise(invitation),
        *_measured(invitation),
        _guarantee(invitation),
        _how_often(invitation),
        *(f"Beware: {warning}." for warning in plan.warnings),
        "You can pause, limit or end this at any time; what was sent before cannot be taken back.",
    ]


def _how_often(invitation: Invitation) -> str:
    plan, correlated, steps = invitation.outline, invitation.correlated, invitation.recipe.federated.steps
    rate, size, people = draw_rate(plan), plan.cohort_size, plan.settings.population_size
    rounds, late = f"How often: {steps:,} rounds{_spare(invitation)}", _in_time(invitation.private)
    if correlated is None or correlated.cycle == 1:
        asked = f"in each of which you are asked with probability {rate:.3g} ({size:,} of {people:,} people)"
        return f"{rounds}, {asked}: about {steps * rate:,.3g} times, {_at_most(invitation)}.{late}"
    cycle = correlated.cycle
    return (
        f"{rounds}. The {people:,} people are in {cycle:,} groups that take turns, and yours is always the same. In "
        f"its rounds you are asked with probability {rate:.3g}: about {steps / cycle * rate:,.3g} times, "
        f"{_at_most(invitation)}. Between two of your rounds lie at least {cycle - 1:,} others. What is promised holds "
        f"only then, so your machine refuses in the turn of another group, and too soon after your last.{late}"
    )


def _weighting(private: PrivacySettings) -> list[str]:
    if private.weighting is Weighting.UNIFORM:
        return []
    return [f"Your update counts by your {private.weighting}, up to {private.weight_cap:g} of them."]


def _given_up(seconds: float | None) -> str:
    return "" if seconds is None else f"; what takes longer than {seconds:g} s is given up, and zeros are sent"


def _in_time(private: PrivacySettings) -> str:
    if private.expected_answers is None:
        return ""
    return (
        f" A round does not wait for the slowest: {private.expected_answers:,} answers are expected in time, and who "
        "is later counts as zero. What is promised counts you as if you were always in time."
    )


def _base_model(base: BaseModelName, invitation: Invitation) -> str:
    megabytes = invitation.length * (invitation.recipe.federated.model_bits or 32) / 8e6
    return (
        f"What it is made from: the base model {base.name}, whose files lie on this machine (sha256 {base.digest}). "
        f"They are read here, and neither sent nor fetched. What is trained comes each time ({megabytes:,.2f} MB)."
    )


def _at_most(invitation: Invitation) -> str:
    if invitation.private.mode is Mode.SEEDED:
        return "and once more for every round that the server repeats. In a simulation nothing limits its repeats"
    limits = invitation.limits
    assert limits is not None
    besides = f", and {limits.measurements:,} times for those numbers" if limits.measurements else ""
    return f"never more than {limits.updates:,}{besides}: above that your machine refuses"


def _spare(invitation: Invitation) -> str:
    spare = invitation.spare_attempts
    return f", and up to {spare:,} attempts more where rounds are lost" if spare else ""


def _visibility(invitation: Invitation) -> str:
    if invitation.secure is None:
        return (
            "Who sees it: the server sees your update by itself, before any noise. It could learn from it about you; "
            "you trust it not to."
        )
    unless = "" if invitation.secure.neighbours is None else " it does not lie about who takes part, and"
    return (
        f"Who sees it: nobody. It is masked, and the server can open sums of at least {invitation.secure.least:,} "
        f"people, as long as{unless} two thirds of them keep to the protocol."
    )


def _noise(invitation: Invitation) -> str:
    private, plan, shares = invitation.private, invitation.outline, invitation.noise_shares
    if private.z == 0:
        return "Noise: none."
    who = "the server adds it to the sum, which it has seen by then"
    if shares is not None:
        who = (
            "everybody adds a share before masking, so that the server sees no sum without noise: one with you in it "
            f"tells it ε = {_epsilon_of_one_sum(plan)}, if no more than {shares.colluding:,} others tell it their share"
        )
    std = plan.released_std_sum
    later = (
        "" if invitation.correlated is None else ". Later rounds take some of it back, so the server keeps it secret"
    )
    return (
        f"Noise: of standard deviation {std:.3g} ({std / private.clip_bound:.3g} times the clip bound); {who}{later}."
    )


def _epsilon_of_one_sum(plan: Plan) -> str:
    """Against the server, of one sum with somebody in it."""
    return format_epsilons(epsilon_for_server(plan, rounds=1, delta=plan.settings.delta))


def _measured(invitation: Invitation) -> list[str]:
    """What is asked besides updates, where anything is."""
    settings, plan = invitation.recipe.federated, invitation.wer_plan
    asked, share = settings.client_wer, settings.clients.holdout
    if asked is None or plan is None or share is None:
        return []
    when = "" if asked.every is None else f"after every {asked.every:,} rounds and "
    times = asked.measured(settings.steps).count
    by_server = (
        "" if plan.noise_shares is None else f"; one with you in it tells the server ε = {_epsilon_of_one_sum(plan)}"
    )
    return [
        f"How well you are understood: {times:,} times ({when}after the last), whoever is drawn anew tries the model "
        f"on their own held-out recordings: {share:.0%} of them, at least two, which are never trained on. "
        f"Two numbers leave: how many words it got wrong, and how many right, scaled down to "
        f"{asked.words:g} together if they are more. They go the same way as an update; the noise on their sums has a "
        f"standard deviation of {plan.released_std_sum:.3g}{by_server}."
    ]


def _guarantee(invitation: Invitation) -> str:
    private = invitation.private
    if private.mode is Mode.SEEDED:
        return "What is promised: nothing. This is a rehearsal: whoever has its seed can take the noise off again."
    assert invitation.epsilon is not None
    measures = invitation.recipe.federated.client_wer is not None
    measured, seen = (" and word counts", " and the error rates") if measures else ("", "")
    inside = invitation.epsilon_inside
    one = "" if inside is None else f" (for one speaker inside a silo ε = {format_epsilons(inside)})"
    step = strength_of((inside or invitation.epsilon).headline)
    return (
        f"What is promised: ε = {format_epsilons(invitation.epsilon)} at δ = {private.delta:g} for each "
        f"{private.privacy_unit}{one}, for all rounds{measured} together{_with_spare(invitation)}, "
        f"against everybody who sees the models{seen}{_exceptions(invitation)}. In words, {step.words}: {step.means}."
    )


def _with_spare(invitation: Invitation) -> str:
    if not invitation.spare_attempts:
        return ""
    without = invitation.epsilon_without_spare
    assert without is not None
    return (
        f" with {invitation.spare_attempts:,} spare attempts (ε = {format_epsilons(without)} if none of them is needed)"
    )


def _exceptions(invitation: Invitation) -> str:
    """Whom sampling does not hide anybody from, where ε counts on it."""
    plan, pairs = invitation.outline, invitation.wer_plan
    told = [] if draw_rate(plan) == 1 else [f"each one tells them ε = {_epsilon_if_known(plan)}"]
    if pairs is not None and draw_rate(pairs) < 1:
        before = "" if told else "each one tells them nothing more, "
        told.append(f"{before}each sum of words right and wrong {'' if told else 'ε = '}{_epsilon_if_known(pairs)}")
    if invitation.secure is None or not told:
        return ""
    return (
        " and not who took part. But people in the same sum see that you are in it, as the server does: of the rounds "
        f"that you are both in, {', '.join(told)}"
    )


def _epsilon_if_known(plan: Plan) -> str:
    """ε of one sum under `plan` to somebody who knows who is in it."""
    once: Event = poisson_release(plan.settings.z, sampling_rate=1.0)
    if isinstance(plan.event, CorrelatedRelease):  # with the rows in which its noise is taken back
        once = repeated(replace(plan.event, sampling_rate=1.0), plan.event.cycle)
    return format_epsilons(epsilon(once, plan.settings.delta))
