"""From features to scores: the encoder's z and c, the predictions, and the steps that they are told from.

Shapes: U utterances, T steps, D width of z, C of c, S = T the steps to be predicted, R rivals of each.
"""

from torch import Tensor

from sottovoce.data.audio.waveforms import Features
from sottovoce.models.cpc.loss import even_places, rival_steps, scores_of
from sottovoce.models.cpc.settings import Settings, predictors
from sottovoce.models.family import Parameters
from sottovoce.models.module import with_corrections
from sottovoce.models.speech_lstm.network import dense_steps, in_context


def contrasted(
    parameters: Parameters, features: Features, *, settings: Settings, draws: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, rivals and lengths, as `losses` takes them; without draws rivals are evenly spread over the utterance."""
    weights, encoder = with_corrections(parameters), settings.encoder
    z_UTD = dense_steps(weights, features.features_UTF, settings=encoder)
    c_UTC, _ = in_context(weights, z_UTD, settings=encoder)
    device, steps = z_UTD.device, z_UTD.shape[1]
    lengths_U = (features.frames_U // encoder.stack).to(device, non_blocking=True)
    # Draws may be for more padding than there is.
    places_USR = even_places(settings.candidates - 1) if draws is None else draws[:, :steps]
    rivals_USR = rival_steps(places_USR.to(device, non_blocking=True), lengths_U, steps)
    return scores_of(z_UTD, c_UTC, predictors(weights, settings=settings)), rivals_USR, lengths_U
