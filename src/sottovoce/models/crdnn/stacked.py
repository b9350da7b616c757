"""Many clients' CRDNNs at once, every tensor with a leading client axis: what `network` and `decoder` do, batched.

One kernel serves a step of all clients. A client's loss is, up to rounding, what it is alone:

    attention    Σ a_t (V m_t + b) = V Σ a_t m_t + b, as attention sums to one: values are taken of all steps, once
    its places   convolutions over the steps of attention are products with matrices that are made once
    embeddings   products with ones and zeros: unlike a table's, their gradients add up in one order

Dropout's masks are drawn client by client in the shapes that each has alone: they depend on no other client.

Shapes: N clients, W utterances of the client with most, B = N·W lines (some idle), U utterances, T frames or encoder
steps, F frequency bins, C channels, D width, E embedding, A attention's width, L tokens of a text and its end, V
tokens, G gates, M = W·T or W·L.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.base.seeds import seeded_kernels
from sottovoce.data.audio.waveforms import Features
from sottovoce.models import ctc, lstm
from sottovoce.models.crdnn.decoder import BEGIN, END
from sottovoce.models.crdnn.network import EPS, SLOPE, reflected
from sottovoce.models.crdnn.settings import DIRECTIONS, POOLING, Settings, parameter_shapes
from sottovoce.models.family import Parameters
from sottovoce.models.stacks import Weights, line_places, stacked_linear, stacked_weights, to_lines


@dataclass(frozen=True, eq=False)
class ClientLines:
    """The utterances of a step, client by client: as many lines for each as the one with most has; idle ones are empty.

    Features are on the device, everything else is on the host.
    """

    features_BTF: Tensor
    frames_B: Tensor
    tokens_BL: Tensor
    token_lengths_B: Tensor
    places_U: Tensor
    clients: int

    @property
    def own(self) -> list[slice]:
        """The lines of each client that hold its utterances."""
        width = len(self.frames_B) // self.clients
        counts = torch.bincount(self.places_U // width, minlength=self.clients).tolist()
        return [slice(number * width, number * width + count) for number, count in enumerate(counts)]


def arrange_lines(
    features: Features, *, rows_U: Sequence[int], clients: int, frame_multiple: int = 1, token_multiple: int = 1
) -> ClientLines:
    """Give every utterance its line; `rows_U` are their clients. Multiples pad lines and texts (with an end each)."""
    places_U, width = line_places(rows_U, clients)

    def lines(own: Tensor) -> Tensor:
        return to_lines(own, places_U, clients * width)

    features_UTF, tokens_UL = features.features_UTF, features.tokens_UL
    return ClientLines(
        lines(F.pad(features_UTF, (0, 0, 0, -features_UTF.shape[1] % frame_multiple))),
        lines(features.frames_U),
        lines(F.pad(tokens_UL, (0, -(tokens_UL.shape[1] + 1) % token_multiple))),
        lines(features.token_lengths_U),
        places_U,
        clients,
    )


# Recorded forms of `encode_clients` and `decode_clients` for these weights, by name; none where there are none.
Record = Callable[[Weights, Settings], Mapping[str, Callable[..., Tensor]]]


def client_losses(
    parameters: Parameters,
    lines: ClientLines,
    *,
    settings: Settings,
    seeds_N: Sequence[int | None],
    mu_N: Sequence[float],
    record: Record | None = None,
) -> Tensor:
    """mu·CE + (1 - mu)·CTC of each client, [N], with its own mu; 0 for one without utterances.

    `record` gives recorded functions for `encode` and `log_probs`.
    """
    weights = stacked_weights(parameters, lines.clients, parameter_shapes(settings))
    plain: dict[str, Callable[..., Tensor]] = {"encode": encode_clients, "log_probs": decode_clients}
    chosen = plain if record is None else {**plain, **record(weights, settings)}
    dtype, device = weights["ctc.weight"].dtype, lines.features_BTF.device
    masks = draw_dropout_masks(lines, seeds_N, settings=settings, dtype=dtype, decoded=max(mu_N) > 0)
    frames_B, tokens_BL = (own.to(device, non_blocking=True) for own in (lines.frames_B, lines.tokens_BL))
    memory_NWTD = chosen["encode"](
        weights, lines.features_BTF.to(dtype), frames_B, *masks.encoder, clients=lines.clients, settings=settings
    )
    mus_N = torch.tensor(mu_N, dtype=torch.promote_types(dtype, torch.float32)).to(device, non_blocking=True)
    total_N = torch.zeros_like(mus_N)
    if max(mu_N) > 0:
        log_probs_NWLV = chosen["log_probs"](
            weights, memory_NWTD, frames_B, tokens_BL, *masks.decoder, settings=settings
        )
        total_N = total_N + mus_N * _cross_entropy(log_probs_NWLV, lines, smoothing=settings.label_smoothing)
    if min(mu_N) < 1:
        log_probs_BTV = ctc.log_softmax(stacked_linear(weights, "ctc", memory_NWTD)).flatten(0, 1)
        total_N = total_N + (1 - mus_N) * ctc.mean_ctc_losses_by_client(
            log_probs_BTV.index_select(0, lines.places_U.to(device, non_blocking=True)),
            lines.frames_B[lines.places_U] // POOLING,
            lines.tokens_BL[lines.places_U],
            lines.token_lengths_B[lines.places_U],
            places=ctc.find_places((lines.places_U // memory_NWTD.shape[1]).tolist(), rows=lines.clients),
            by_token=True,
        )
    return total_N


def _cross_entropy(log_probs_NWLV: Tensor, lines: ClientLines, *, smoothing: float) -> Tensor:
    """`family.cross_entropy` of each client, [N]."""
    device, clients = log_probs_NWLV.device, lines.clients
    targets_BL = F.pad(lines.tokens_BL, (0, 1), value=END)  # zero behind each text, as END is
    spoken_B = torch.zeros(len(targets_BL), dtype=torch.bool).index_fill_(0, lines.places_U, True)
    counted_BL = (torch.arange(targets_BL.shape[1]) <= lines.token_lengths_B[:, None]) & spoken_B[:, None]
    counts_N = counted_BL.view(clients, -1).sum(dim=1).clamp(min=1).to(device, non_blocking=True)
    targets_NWL1 = targets_BL.view(*log_probs_NWLV.shape[:3], 1).to(device, non_blocking=True)
    said_NWL = log_probs_NWLV.gather(3, targets_NWL1)[..., 0]
    smoothed_NWL = (1 - smoothing) * said_NWL + smoothing * log_probs_NWLV.mean(dim=3)
    counted_NWL = counted_BL.view(said_NWL.shape).to(device, non_blocking=True)
    return -torch.where(counted_NWL, smoothed_NWL, 0).sum(dim=(1, 2)) / counts_N


def _normalised(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Layer norm over a client's last dimensions, [N, M, …], with its own gains."""
    gain, bias = weights[f"{name}.weight"][:, None], weights[f"{name}.bias"][:, None]
    return torch.addcmul(bias, F.layer_norm(x, gain.shape[2:], eps=EPS), gain)


# Dropout.


@dataclass(frozen=True, eq=False)
class DropoutMasks:
    """What a step's dropouts multiply by, in the order of their use; none without dropout."""

    encoder: list[Tensor]  # channels [N, W, C, 1, 1], then [N, W, T, D] between LSTMs, and in the DNN
    decoder: list[Tensor]  # one: [L, N, W, E + A], of the token before and of the context


def draw_dropout_masks(
    lines: ClientLines, seeds_N: Sequence[int | None], *, settings: Settings, dtype: torch.dtype, decoded: bool
) -> DropoutMasks:
    """Each client's own, from its seed and in the order and the shapes of its own batch."""
    if not settings.dropout:
        return DropoutMasks([], [])
    device, clients, width = lines.features_BTF.device, lines.clients, len(lines.frames_B) // lines.clients
    steps, tokens = max(lines.features_BTF.shape[1] // POOLING, 1), lines.tokens_BL.shape[1] + 1

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def drawn(*shape: int) -> Tensor:
        return F.dropout(torch.ones(shape, dtype=dtype, device=device), settings.dropout)

    planes = [empty(clients, width, channels, 1, 1) for channels in settings.channels]
    widths = [2 * settings.rnn_width] * (settings.rnn_layers - 1) + [settings.dnn_width] * settings.dnn_layers
    in_time = [empty(clients, width, steps, size) for size in widths]
    given_LNWD = empty(tokens, clients, width, settings.embedding + settings.decoder_width)
    for client, (own, seed) in enumerate(zip(lines.own, seeds_N, strict=True)):
        if seed is None:
            continue
        frames_U, count = lines.frames_B[own], own.stop - own.start
        own_steps, own_tokens = int(frames_U.max()) // POOLING, int(lines.token_lengths_B[own].max()) + 1
        with seeded_kernels(seed, device=device):
            for mask in planes:
                mask[client, :count] = drawn(count, mask.shape[2], 1, 1)
            for mask in in_time:
                mask[client, :count, :own_steps] = drawn(count, own_steps, mask.shape[-1])
            if not decoded:
                continue
            own_given = given_LNWD[:own_tokens, client, :count]
            if device.type == "cpu":
                for mask in own_given:
                    mask.copy_(drawn(*mask.shape))
            else:  # not the same as alone, though as much its own: as many launches as tokens would cost too much
                own_given.copy_(drawn(*own_given.shape))
    return DropoutMasks(planes + in_time, [given_LNWD])


def _dropped(x: Tensor, masks: Iterator[Tensor]) -> Tensor:
    mask = next(masks, None)
    return x if mask is None else x * mask


# The encoder.


def encode_clients(
    weights: Weights, features_BTF: Tensor, frames_B: Tensor, *masks: Tensor, clients: int, settings: Settings
) -> Tensor:
    """What the decoder attends to: [N, W, T, D]. Everything is on the device."""
    dropping = iter(masks)
    x_NWTD = _convolve(weights, features_BTF, frames_B, dropping, clients=clients, settings=settings)
    x_NWTD = _recur(weights, x_NWTD, frames_B, dropping, settings=settings)
    for layer in range(settings.dnn_layers):
        x_NWTD = stacked_linear(weights, f"dnn.{layer}.linear", x_NWTD)
        x_NWTD = _normalised(weights, f"dnn.{layer}.norm", x_NWTD.flatten(1, 2)).view_as(x_NWTD)
        x_NWTD = _dropped(F.leaky_relu(x_NWTD, SLOPE), dropping)
    return x_NWTD


def _convolve(
    weights: Weights,
    features_BTF: Tensor,
    frames_B: Tensor,
    masks: Iterator[Tensor],
    *,
    clients: int,
    settings: Settings,
) -> Tensor:
    """`network.convolve`: [N, W, T/4, F·C]. The convolutions themselves are few, and done client by client."""
    short = max(POOLING - features_BTF.shape[1], 0)
    x_BCTF = F.pad(features_BTF, (0, 0, 0, short))[:, None]
    # By lines: given a client axis, one utterance alone has strides in which torch no longer sees [B, T, F, C].
    planes = (mask_NWC11.flatten(0, 1) for mask_NWC11 in masks)
    for block in range(len(settings.channels)):
        for number in (1, 2):
            conv, norm = f"cnn.{block}.conv{number}", f"cnn.{block}.norm{number}"
            x_BCTF = reflected(x_BCTF, frames_B)
            own = zip(x_BCTF.chunk(clients), weights[f"{conv}.weight"], weights[f"{conv}.bias"], strict=True)
            x_BTFC = torch.cat([F.conv2d(*inputs).permute(0, 2, 3, 1) for inputs in own])
            x_NMFC = x_BTFC.reshape(clients, -1, *x_BTFC.shape[2:])
            x_BTFC = F.leaky_relu(_normalised(weights, norm, x_NMFC), SLOPE).view_as(x_BTFC)
            x_BCTF = x_BTFC.permute(0, 3, 1, 2)
        x_BCTF = F.max_pool2d(x_BCTF, (1, 2))
        x_BCTF = _dropped(x_BCTF, planes)
    x_BCTF = F.max_pool2d(x_BCTF, (POOLING, 1))
    x_BTD = x_BCTF.permute(0, 2, 3, 1).flatten(2)
    return x_BTD.view(clients, -1, *x_BTD.shape[1:])


def _recur(
    weights: Weights, x_NWTD: Tensor, frames_B: Tensor, masks: Iterator[Tensor], *, settings: Settings
) -> Tensor:
    """Bidirectional LSTMs over each utterance's own steps: [N, W, T, 2D]."""
    turned_NWT = lstm.turned_places(_steps(frames_B), x_NWTD.shape[2]).view(x_NWTD.shape[:3])
    for layer in range(settings.rnn_layers):
        if layer:
            x_NWTD = _dropped(x_NWTD, masks)
        stems = [f"rnn.{layer}.{direction}" for direction in DIRECTIONS]
        both = lstm.Cell(*(torch.cat([weights[f"{stem}.{name}"] for stem in stems]) for name in lstm.NAMES))
        x_NWTD = lstm.bidirectional(x_NWTD, turned_NWT, both)
    return x_NWTD


def _steps(frames_B: Tensor) -> Tensor:
    return (frames_B // POOLING).clamp(min=1)


# The decoder.


def decode_clients(
    weights: Weights, memory_NWTD: Tensor, frames_B: Tensor, tokens_BL: Tensor, *masks: Tensor, settings: Settings
) -> Tensor:
    """`decoder.teacher_forced`: log-probabilities [N, W, L, V] of each token and of the end.

    Everything is on the device, and what does not depend on the token is done before.
    """
    clients, width, steps, _ = memory_NWTD.shape
    dtype, lengths_NW1 = memory_NWTD.dtype, _steps(frames_B).view(clients, width, 1)
    inside_NWT = torch.arange(steps, device=frames_B.device) < lengths_NW1
    attention_NWT = inside_NWT.to(dtype) / lengths_NW1.to(dtype)
    outside_NM1 = torch.zeros_like(attention_NWT).masked_fill_(~inside_NWT, -torch.inf).view(clients, -1, 1)
    values_BTA = stacked_linear(weights, "attention.value", memory_NWTD).flatten(0, 1)
    bias_N11A = (weights["attention.query.bias"] + weights["attention.location.bias"])[:, None, None]
    keys_NWTA = stacked_linear(weights, "attention.key", memory_NWTD) + bias_N11A
    query_NDA, location_NCA, score_NA1 = (
        weights[f"attention.{name}.weight"].mT for name in ("query", "location", "score")
    )
    kernels_NTX = attention_kernels(weights["attention.places.weight"], steps)
    given_LNWG = _given(weights, tokens_BL.view(clients, width, -1), *masks, settings=settings)
    context_NAG = weights["gru.input.weight"][..., settings.embedding :].mT
    recurrent_NDG, bias_N1G = weights["gru.recurrent.weight"].mT, weights["gru.recurrent.bias"][:, None]

    hidden_NWD = context_NWA = memory_NWTD.new_zeros(clients, width, settings.decoder_width)
    contexts, hiddens = [], []
    for step, given_NWG in enumerate(given_LNWG.unbind()):
        for mask_LNWD in masks:
            context_NWA = context_NWA * mask_LNWD[step, ..., settings.embedding :]
        hidden_NWD = gru_cell(
            torch.baddbmm(given_NWG, context_NWA, context_NAG),
            torch.baddbmm(bias_N1G, hidden_NWD, recurrent_NDG),
            hidden_NWD,
        )
        places_NMC = torch.bmm(attention_NWT.detach(), kernels_NTX).view(clients, width * steps, -1)
        asked_NMA = (keys_NWTA + torch.bmm(hidden_NWD, query_NDA)[:, :, None]).flatten(1, 2)
        attended_NMA = torch.tanh(torch.baddbmm(asked_NMA, places_NMC, location_NCA))
        scores_NM1 = torch.baddbmm(outside_NM1, attended_NMA, score_NA1)
        attention_NWT = scores_NM1.view(clients, width, steps).softmax(dim=-1)
        context_NWA = torch.bmm(attention_NWT.view(-1, 1, steps), values_BTA).view(clients, width, -1)
        contexts.append(context_NWA)
        hiddens.append(hidden_NWD)
    read_NWLD = torch.cat([torch.stack(contexts, dim=2), torch.stack(hiddens, dim=2)], dim=-1)
    return ctc.log_softmax(stacked_linear(weights, "output", stacked_linear(weights, "readout", read_NWLD)))


def _given(weights: Weights, tokens_NWL: Tensor, *masks: Tensor, settings: Settings) -> Tensor:
    """What the GRU's gates make of the beginning and of each token: [L, N, W, 3D]."""
    table_NVE = weights["embedding.weight"]
    given_NWL1 = F.pad(tokens_NWL, (1, 0), value=BEGIN)[..., None]
    chosen_NWLV = (given_NWL1 == torch.arange(settings.tokens, device=given_NWL1.device)).to(table_NVE.dtype)
    given_NME = torch.bmm(chosen_NWLV.flatten(1, 2), table_NVE)
    for mask_LNWD in masks:
        given_NME = given_NME * mask_LNWD[..., : settings.embedding].permute(1, 2, 0, 3).flatten(1, 2)
    matrix_NEG = weights["gru.input.weight"][..., : settings.embedding].mT
    gates_NMG = torch.baddbmm(weights["gru.input.bias"][:, None], given_NME, matrix_NEG)
    return gates_NMG.view(*given_NWL1.shape[:3], -1).permute(2, 0, 1, 3)


def attention_kernels(kernels_NC1K: Tensor, steps: int) -> Tensor:
    """Convolutions over the steps of attention as matrices [N, T, T·C], made once for all tokens."""
    reach = kernels_NC1K.shape[-1] // 2
    outside = max(steps - 1 - reach, 0)
    # Output t sees step s through the kernel's place reach + s - t; window reach + outside - t begins there.
    windows_NCTS = F.pad(kernels_NC1K[:, :, 0], (outside, outside)).unfold(-1, steps, 1)
    first = reach + outside
    return windows_NCTS[:, :, first - steps + 1 : first + 1].flip(2).permute(0, 3, 2, 1).flatten(2)


def gru_cell(inputs_NWG: Tensor, recurrent_NWG: Tensor, hidden_NWD: Tensor) -> Tensor:
    """h' = (1 - z) n + z h, with r, z = σ(…) and n = tanh(inputs + r · recurrent): on a GPU one kernel, torch's own."""
    if inputs_NWG.is_cuda:
        flat = (inputs_NWG.flatten(0, 1), recurrent_NWG.flatten(0, 1), hidden_NWD.flatten(0, 1))
        found_BD: Tensor = torch.ops.aten._thnn_fused_gru_cell(*flat)[0]
        return found_BD.view_as(hidden_NWD)
    width = hidden_NWD.shape[-1]
    rz_NWG = torch.sigmoid(inputs_NWG[..., : 2 * width] + recurrent_NWG[..., : 2 * width])
    r, z = rz_NWG.chunk(2, dim=-1)
    n = torch.tanh(torch.addcmul(inputs_NWG[..., 2 * width :], r, recurrent_NWG[..., 2 * width :]))
    return n + z * (hidden_NWD - n)
