"""A client of the workload for Flower. A module of its own, because Ray's workers import it by name."""

from dataclasses import asdict
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from workload import CLIP_GRADIENTS, LOCAL_LR, WORKLOADS, RecogniserModule, Tally, client_steps, cohort

ONE_EACH = "weight"  # clients count alike in the mean


@cache
def _worker_module(name: str, device: torch.device) -> RecogniserModule:
    return RecogniserModule(WORKLOADS[name]).to(device)


def train_client(message: Message, context: Context) -> Message:
    """One client's local steps, in a worker."""
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    device, round_number = torch.device(config["device"]), config["server-round"] - 1
    module = _worker_module(config["workload"], device)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    module.tally = Tally()
    optimiser = torch.optim.SGD(module.parameters(), lr=LOCAL_LR)
    number = cohort(module.workload, round_number)[context.node_config["partition-id"]]
    for step in client_steps(module.workload, number, round_number=round_number, device=device):
        optimiser.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = module.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_GRADIENTS)
        optimiser.step()
    metrics = MetricRecord({ONE_EACH: 1, **asdict(module.tally)})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
