"""How many of ten equal clients count, by the weights of Gao et al. (2022), when their WERs are measured with noise.

    python benchmarks/effective_clients.py [--clients 10] [--wer 0.2] [--words 9.28] [--draws 20000]

All clients' models have the same true WER. Each is measured on so many words, every one of which is wrong with that
probability, independently: the measured rate is binomial. Weights follow by the package's own formulas, and
1/Σω² clients count: all of them where the weights are equal, one where it has all the weight. Printed is the mean over
draws of a round.

Measured on shared speech, clients' errors fall on the same words, so their rates differ by less than this; errors that
come in runs make any rate noisier. The default words of an utterance, and its seconds, are the means of the 50 French
clips of commonvoice-fr-mini.
"""

import argparse

import numpy as np

from sottovoce.federated.weighting import SCORES, ClientFigures
from sottovoce.privacy.settings import Weighting

SECONDS = 5.407  # of an utterance
DAY = round(24 * 3600 / SECONDS)
MEASURED_ON = {"2 utterances (the smallest hold-out)": 2, "60 utterances": 60, f"a day of speech ({DAY:,})": DAY}
RULES = {"Eq. 10, exp(1 − WER)": Weighting.WER, "released, exp(100 − WER in %)": Weighting.WER_RELEASED}


def count_effective_clients(
    weighting: Weighting, *, words: int, wer: float, clients: int = 10, draws: int = 20_000, seed: int = 1
) -> float:
    """The mean of 1/Σω² over `draws` rounds of equal `clients`, each measured on so many `words`."""
    rates = np.random.default_rng(seed).binomial(words, wer, size=(draws, clients)) / words
    possible, places = np.unique(rates, return_inverse=True)
    scores = np.array([SCORES[weighting](ClientFigures(1, 1.0, wer=float(rate))) for rate in possible])
    scores = scores[places.reshape(rates.shape)]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    return float((1 / (shares**2).sum(axis=1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--wer", type=float, default=0.2, help="the true WER of all of them, as a share")
    parser.add_argument("--words", type=float, default=9.28, help="of an utterance")
    parser.add_argument("--draws", type=int, default=20_000)
    args = parser.parse_args()
    print(f"of {args.clients} equal clients with a WER of {args.wer:.0%}, so many count (1/Σω²):")
    for name, utterances in MEASURED_ON.items():
        words = round(utterances * args.words)
        noise = 100 * (args.wer * (1 - args.wer) / words) ** 0.5
        found = [
            count_effective_clients(rule, words=words, wer=args.wer, clients=args.clients, draws=args.draws)
            for rule in RULES.values()
        ]
        cells = "; ".join(f"{rule}: {count:.2f}" for rule, count in zip(RULES, found, strict=True))
        print(f"  {name}, {words:,} words, WER ± {noise:.2f} points: {cells}")


if __name__ == "__main__":
    main()
