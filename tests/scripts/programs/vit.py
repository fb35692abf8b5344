"""A small vision transformer, with a class token, dropout of zero, validation and the best weights kept."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PatchEmbed(nn.Module):
    def __init__(self, image=16, patch=4, dim=32):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.count = (image // patch) ** 2

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    def __init__(self, classes=5, dim=32, depth=2, heads=4):
        super().__init__()
        self.patches = PatchEmbed(dim=dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, self.patches.count + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward_features(self, x):
        x = self.patches(x)
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1) + self.pos_embed
        return self.norm(self.encoder(x))

    def forward(self, x):
        return self.head(self.forward_features(x)[:, 0])


def train_one_epoch(model, loader, criterion, optimizer, device):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = criterion(model(images), labels)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"  loss={loss.item():.6f}")


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    model.eval()
    loss, correct = 0.0, 0
    for images, labels in loader:
        logits = model(images.to(device))
        loss += criterion(logits, labels.to(device)).item() * len(labels)
        correct += (logits.argmax(1).cpu() == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = torch.randn(40, 3, 16, 16), torch.randint(0, 5, (40,))
    train_set, val_set = TensorDataset(images[:32], labels[:32]), TensorDataset(images[32:], labels[32:])
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=4, shuffle=False)
    model = VisionTransformer().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and "pos_embed" not in n and "cls" not in n]
    plain = [
        p for n, p in model.named_parameters() if not (p.ndim > 1 and "pos_embed" not in n and "cls" not in n)
    ]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, lr=5e-2, momentum=0.9, nesterov=True)
    best = float("inf")
    for epoch in range(2):
        train_one_epoch(model, train_loader, criterion, optimizer, device)
        val_loss, accuracy = evaluate(model, val_loader, criterion, device)
        print(f"epoch {epoch}: val loss {val_loss:.6f}, accuracy {accuracy:.3f}")
        if val_loss < best:
            best = val_loss
            torch.save({"state_dict": model.state_dict(), "epoch": epoch, "val_loss": val_loss}, "best.pth")
    with torch.no_grad():
        features = model.forward_features(images[:2].to(device))
        print(f"probe loss {criterion(model.head(features[:, 0]), labels[:2].to(device)).item():.6f}")
    print("mean feature", f"{features.mean().item():.4f}")


if __name__ == "__main__":
    main()
