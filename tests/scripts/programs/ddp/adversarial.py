"""A GAN for DistributedDataParallel: a discriminator with BatchNorm that runs twice before it is trained, hooks of
gradients, an average of the generator's weights made by arithmetic, the best weights kept and taken again."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6) * 2 + 1)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=4, sampler=sampler)


def clip(gradient):
    return gradient.clamp(-0.01, 0.01)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(F.leaky_relu(self.norm(self.inp(x)), 0.2))


generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6))
discriminator = Discriminator()
removed = [generator[2].weight.register_hook(clip), generator[2].bias.register_hook(lambda g: g * 100)]
generator[4].bias.register_hook(lambda g: g * 0.5)
generator[4].bias.requires_grad_(False)
generator, discriminator = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
removed[1].remove()
discriminator.module.inp.weight.register_hook(clip)
trained = [param for param in generator.parameters() if param.requires_grad]
of_generator = torch.optim.Adam(trained, lr=1e-2, betas=(0.5, 0.9))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.9))
average = {name: param.detach().clone() for name, param in generator.module.named_parameters()}
best, kept = float("inf"), None

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 3))
        of_discriminator.zero_grad()
        told_real, told_fake = discriminator(real), discriminator(fake.detach())
        loss = F.softplus(-told_real).mean() + F.softplus(told_fake).mean()
        loss.backward()
        of_discriminator.step()

        of_generator.zero_grad()
        fooled = F.softplus(-discriminator(fake)).mean()
        fooled.backward()
        of_generator.step()
        for name, param in generator.module.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * param.detach()
        print(f"loss {loss.item():.6f} loss {fooled.item():.6f}")

    score = fooled.detach().clone()
    dist.all_reduce(score)
    if score.item() < best:
        best, kept = score.item(), copy.deepcopy(generator.state_dict())
        if rank == 0:
            torch.save(generator.state_dict(), "best.pt")

generator.load_state_dict(kept)  # while rank 0 may still write
torch.save({"average": average, "halved": {name: mean.half() for name, mean in average.items()}}, "average.pt")
if rank == 0:
    torch.save(discriminator.module.state_dict(), "discriminator.pt")
    torch.save(of_generator.state_dict(), "optimizer.pt")
assert os.path.exists("best.pt") or rank
dist.destroy_process_group()
