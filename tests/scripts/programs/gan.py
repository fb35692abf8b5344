"""Two networks with two optimizers, initialised after they were moved, as in the well-known tutorial."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

manual_seed = 999
torch.manual_seed(manual_seed)
batch_size, nz, ngf, ndf = 8, 8, 8, 8
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
real_images = torch.tanh(torch.randn(24, 1, 8, 8))
dataloader = DataLoader(TensorDataset(real_images), batch_size=batch_size, shuffle=True)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input)


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

for epoch in range(2):
    for i, data in enumerate(dataloader, 0):
        netD.zero_grad()
        real = data[0].to(device)
        output = netD(real).view(-1)
        errD_real = criterion(output, torch.full((real.size(0),), 1.0, device=device))
        errD_real.backward()
        noise = torch.randn(batch_size, nz, 1, 1, device=device)
        fake = netG(noise)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, torch.full((batch_size,), 0.0, device=device))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        output = netD(fake).view(-1)
        errG = criterion(output, torch.full((batch_size,), 1.0, device=device))
        errG.backward()
        optimizerG.step()
        print(
            f"[{epoch}][{i}/{len(dataloader)}] D loss {(errD_real + errD_fake).item():.6f} G loss {errG.item():.6f}"
        )
with torch.no_grad():
    fake = netG(fixed_noise).detach().cpu()
torch.save({"samples": fake, "G": netG.state_dict(), "D": netD.state_dict()}, "gan.pth")
torch.save(netG.state_dict(), "netG.pth")
