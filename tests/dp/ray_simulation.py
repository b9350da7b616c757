"""Run the app in Flower's own simulation with ray, and leave its model: python -m tests.dp.ray_simulation FOLDER"""

import sys
from pathlib import Path

import numpy as np
from flwr.serverapp.strategy import Result
from flwr.simulation import run_simulation
from tests.dp.flower_app import make_client_app, serve

from sottovoce.dp.flower import make_clip_mod, to_models

if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), list[Result]()
    one = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(serve(folder, results), make_client_app([make_clip_mod()]), num_supernodes=12, backend_config=one)
    np.savez(folder / "model.npz", **to_models(results[0].arrays))
