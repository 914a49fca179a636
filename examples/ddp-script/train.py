"""A small DDP script that knows nothing of gptctl: fits a teacher network on synthetic data.

    torchrun --standalone --nproc-per-node 2 train.py --batch_size 32 10 5
    gptctl submit --nodes 1 --gpus-per-node 2 --follow -- train.py --batch_size 32 10 5

Needs only torch. Uses nccl on GPUs and gloo on CPUs. Resumes from its last snapshot.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit a teacher network, data parallel.")
    parser.add_argument("total_epochs", type=int, help="epochs in all")
    parser.add_argument("save_every", type=int, help="epochs between two snapshots")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--snapshot", default="snapshot.pt", help="file to save to and resume from")
    return parser.parse_args()


def make_data(samples: int = 4096, features: int = 20) -> TensorDataset:
    """The same on every rank: the seed is fixed, and the sampler gives each rank its part."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator)
    teacher = torch.randn(features, 1, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs @ teacher))


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = make_data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first_epoch = 0
    if os.path.exists(arguments.snapshot):
        snapshot = torch.load(arguments.snapshot, map_location=device, weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first_epoch = snapshot["epochs"]
        print(f"[rank {rank}] resuming after epoch {first_epoch}")
    dist.barrier()  # every rank has read the snapshot before rank 0 writes a new one
    ddp = DistributedDataParallel(model)
    for epoch in range(first_epoch, arguments.total_epochs):
        sampler.set_epoch(epoch)
        total, steps = torch.zeros((), device=device), 0
        for inputs, labels in loader:
            loss = nn.functional.mse_loss(ddp(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1
        loss_of_epoch = mean_over_ranks(total / steps)
        if rank == 0:
            done = f"epoch {epoch + 1} of {arguments.total_epochs}"
            print(f"{done}: loss {loss_of_epoch:.5f}, {steps} steps on {world} ranks")
            if (epoch + 1) % arguments.save_every == 0:
                save(arguments.snapshot, model, optimizer, epoch + 1)
    dist.barrier()  # no rank closes its connections while another one still needs them


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write to another name first: a process killed meanwhile leaves the old snapshot intact."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    print(f"epoch {epochs}: saved {path}")


def main() -> None:
    arguments = parse()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(arguments, device)
    # DDP is part of reference cycles. If it outlives the process group, torch may abort at exit.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
