"""What scripts do in a step before the optimizer's: by name, the lines for each place of a script."""

ADDITIONS: dict[str, dict[str, str]] = {
    "clip_norm": {
        "grads": """
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
record["norms"].append(float(norm))
""",
    },
    "clip_value": {
        "grads": """
torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
""",
    },
    "clip_by_hand": {
        "grads": """
total = torch.sqrt(sum((p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)))
for p in model.parameters():
    if p.grad is not None:
        p.grad.mul_(min(1.0, 0.3 / (total.item() + 1e-06)))
""",
    },
    "grad_noise": {
        "grads": """
for p in model.parameters():
    if p.grad is not None:
        p.grad.add_(torch.randn_like(p.grad), alpha=0.001)
""",
    },
    "l2": {
        "loss": """
loss = loss + 0.001 * sum((p.pow(2).sum() for p in model.parameters() if p.requires_grad))
""",
    },
    "l1_named": {
        "loss": """
loss = loss + 0.0001 * sum((p.abs().sum() for n, p in model.named_parameters() if "weight" in n))
""",
    },
    "grad_log": {
        "grads": """
record["norms"].append(
    {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
)
""",
    },
    "input_noise": {
        "batch": """
x = x + 0.05 * torch.randn_like(x) if x.is_floating_point() else x
""",
    },
    "input_dropout": {
        "batch": """
x = F.dropout(x, 0.1) if x.is_floating_point() else x
""",
    },
    "flip": {
        "batch": """
x = (
    torch.where(
        (torch.rand(len(x), device=x.device) < 0.5).view(-1, *[1] * (x.dim() - 1)), x.flip(-1), x
    )
    if x.dim() == 4
    else x
)
""",
    },
    "lr_by_hand": {
        "grads": """
for g in optimizer.param_groups:
    g["lr"] = g["lr"] * 0.95
""",
    },
    "skip_nan": {
        "grads": """
if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
    continue
""",
    },
    "accuracy": {
        "out": """
record["seen"] = record.get("seen", 0) + int((out.detach().argmax(-1) >= 0).all())
""",
    },
    "two_passes": {
        "out": """
loss2 = criterion(model(x), y)
""",
        "loss": """
loss = 0.5 * loss + 0.5 * loss2
""",
    },
    "consistency": {
        "loss": """
with torch.no_grad():
    target = model(x).detach()
loss = loss + 0.1 * F.mse_loss(out, target)
""",
    },
    "input_gradient": {
        "batch": """
x = x.clone().requires_grad_(True) if x.is_floating_point() else x
""",
        "loss": """
loss = loss + (
    0.1
    * torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    .pow(2)
    .sum(tuple(range(1, x.dim())))
    .mean()
    if x.is_floating_point()
    else 0
)
""",
    },
    "fgsm": {
        "batch": """
if x.is_floating_point():
    z = x.clone().requires_grad_(True)
    (g,) = torch.autograd.grad(criterion(model(z), y), z)
    x = x + 0.01 * g.sign()
""",
    },
    "label_noise": {
        "batch": """
y = (
    torch.where(torch.rand(y.shape[0], device=y.device) < 0.1, torch.randint_like(y, 0, 4), y)
    if y.dim() == 1
    else y
)
""",
    },
    "center_grad": {
        "grads": """
for p in model.parameters():
    if p.grad is not None and p.dim() > 1:
        p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
""",
    },
    "distances": {
        "loss": """
loss = loss + 0.01 * out.norm(dim=-1).mean()
""",
    },
    "grad_flat": {
        "grads": """
record["norms"].append(
    torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
)
""",
    },
}
