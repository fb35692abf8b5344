"""What scripts do around steps and with weights: by name, the lines for each place of a script."""

ADDITIONS: dict[str, dict[str, str]] = {
    "ema": {
        "moved": """
ema = copy.deepcopy(model)
[p.requires_grad_(False) for p in ema.parameters()]
""",
        "stepped": """
with torch.no_grad():
    for a, p in zip(ema.parameters(), model.parameters()):
        a.mul_(0.9).add_(p, alpha=0.1)
    for a, b in zip(ema.buffers(), model.buffers()):
        a.copy_(b)
""",
        "end": """
save(ema.state_dict(), "ema.pt")
""",
    },
    "averaged": {
        "moved": """
ema = torch.optim.swa_utils.AveragedModel(model)
""",
        "stepped": """
ema.update_parameters(model)
""",
        "end": """
save(ema.module.state_dict(), "ema.pt")
""",
    },
    "shadow": {
        "moved": """
shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
""",
        "stepped": """
for n, p in model.named_parameters():
    shadow[n] = 0.9 * shadow[n] + 0.1 * p.detach()
""",
        "end": """
save(shadow, "ema.pt")
""",
    },
    "freeze_first": {
        "made": """
next(iter(model.children())).requires_grad_(False)
""",
    },
    "unfreeze_later": {
        "made": """
frozen = list(model.children())[0]
frozen.requires_grad_(False)
""",
        "epoch": """
frozen.requires_grad_(True)
""",
    },
    "validate": {
        "epoch": """
model.eval()
with torch.no_grad():
    value = (
        sum(
            (
                criterion(model(a.to(device)), b.to(device)).item() * len(a)
                for a, b in DataLoader(TensorDataset(X, Y), 5)
            )
        )
        / ROWS
    )
record["valid"].append(value)
model.train()
""",
    },
    "validate_no_eval": {
        "epoch": """
with torch.no_grad():
    record["valid"].append(
        model(X[:6].to(device)).mean().item()
        if not any(
            (isinstance(m, (nn.Dropout, nn.modules.batchnorm._BatchNorm)) for m in model.modules())
        )
        else 0.0
    )
""",
    },
    "best": {
        "moved": """
best = {"loss": float("inf")}
""",
        "epoch": """
model.eval()
with torch.inference_mode():
    value = criterion(model(X.to(device)), Y.to(device)).item()
model.train()
if value < best["loss"]:
    best["loss"] = value
    best["state"] = copy.deepcopy(model.state_dict())
    save(model.state_dict(), "best.pt")
""",
        "end": """
model.load_state_dict(best["state"])
""",
    },
    "weight_log": {
        "stepped": """
record["norms"].append([round(p.detach().float().mean().item(), 5) for p in model.parameters()])
""",
    },
    "weight_clip": {
        "stepped": """
for p in model.parameters():
    p.data.clamp_(-0.4, 0.4)
""",
    },
    "max_norm": {
        "stepped": """
with torch.no_grad():
    for m in model.modules():
        if isinstance(m, nn.Linear):
            m.weight.copy_(torch.renorm(m.weight, 2, 0, 1.0))
""",
    },
    "hooked": {
        "made": """
seen = []
list(model.children())[-1].register_forward_hook(
    lambda m, i, o: seen.append(
        float((o[0] if isinstance(o, tuple) else o).detach().abs().max() > 0)
    )
)
""",
        "end": """
record["seen"] = sum(seen)
""",
    },
    "activation_penalty": {
        "made": """
acts = []
last = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][0]
last.register_forward_hook(lambda m, i, o: acts.append(o))
""",
        "loss": """
loss = loss + 0.01 * acts[-1].pow(2).mean()
acts.clear()
""",
    },
    "param_hook": {
        "made": """
[p.register_hook(lambda g: g.clamp(-0.05, 0.05)) for p in model.parameters() if p.requires_grad]
""",
    },
    "set_none": {
        "grads": """
[p.grad for p in model.parameters()]
""",
        "stepped": """
optimizer.zero_grad(set_to_none=False)
""",
    },
    "grad_none_by_hand": {
        "stepped": """
for p in model.parameters():
    p.grad = None
""",
    },
    "reinit_head": {
        "epoch": """
if epoch == 0:
    with torch.no_grad():
        list(model.parameters())[-1].zero_()
""",
    },
    "resume": {
        "epoch": """
save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "ckpt.pt")
state = torch.load("ckpt.pt", map_location=device)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
""",
    },
    "checkpointing": {
        "moved": """
from torch.utils.checkpoint import checkpoint

run = lambda x: checkpoint(model, x, use_reentrant=False)
""",
    },
    "autocast": {
        "moved": """
def run(x):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return model(x)
""",
    },
    "prox": {
        "moved": """
start = [p.detach().clone() for p in model.parameters()]
""",
        "loss": """
loss = loss + 0.01 * sum(((p - q).pow(2).sum() for p, q in zip(model.parameters(), start)))
""",
    },
    "lookahead": {
        "moved": """
slow = [p.detach().clone() for p in model.parameters()]
""",
        "stepped": """
if step % 2 == 1:
    with torch.no_grad():
        for p, q in zip(model.parameters(), slow):
            q.add_(p - q, alpha=0.5)
            p.copy_(q)
""",
    },
    "frozen_teacher": {
        "made": """
teacher = copy.deepcopy(model).eval().requires_grad_(False)
""",
        "loss": """
with torch.no_grad():
    t = teacher(x)
loss = loss + 0.5 * F.mse_loss(out, t)
""",
    },
    "frozen_bn": {
        "made": """
def freeze_bn(m):
    if isinstance(m, nn.modules.batchnorm._BatchNorm):
        m.eval()
""",
        "batch": """
model.apply(freeze_bn)
""",
    },
    "temperature": {
        "moved": """
temperature = nn.Parameter(torch.ones((), device=device))
optimizer.add_param_group({"params": [temperature]})
""",
        "out": """
out = out * temperature
""",
    },
    "vector": {
        "stepped": """
record["norms"].append(nn.utils.parameters_to_vector(model.parameters()).norm().item())
""",
    },
    "prune": {
        "epoch": """
with torch.no_grad():
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_((p.abs() > 0.01).to(p.dtype))
""",
    },
    "state_reset": {
        "epoch": """
optimizer.state.clear()
""",
    },
    "copy_weights": {
        "epoch": """
sd = model.state_dict()
sd = {k: v * 0.99 if v.is_floating_point() else v for k, v in sd.items()}
model.load_state_dict(sd)
""",
    },
}
