"""Losses by the kind of what is learnt, optimizers, and schedules of learning rates."""

LOSSES = {
    "classes": [
        "F.cross_entropy(out, y)",
        "F.cross_entropy(out, y, label_smoothing=0.1)",
        "F.cross_entropy(out, y, weight=torch.linspace(0.5, 2, CLASSES, device=device))",
        "F.cross_entropy(out, y, reduction='sum')",
        "F.cross_entropy(out, y, reduction='sum') / len(y)",
        "F.cross_entropy(out, y, reduction='none').mean()",
        "F.nll_loss(F.log_softmax(out, -1), y)",
        "F.binary_cross_entropy_with_logits(out, F.one_hot(y, CLASSES).to(out.dtype))",
        """
F.kl_div(F.log_softmax(out, 1), F.softmax(F.one_hot(y, CLASSES) * 3.0, 1), reduction="batchmean")
""",
        "F.multi_margin_loss(out, y)",
        "-(out.log_softmax(-1).gather(1, y[:, None])).mean()",
        """
(1 - out.softmax(1).gather(1, y[:, None]).squeeze(1)).pow(2).mul(
    F.cross_entropy(out, y, reduction="none")
).mean()
""",
        "F.cross_entropy(out, y) + 0.01 * out.pow(2).mean()",
        "F.cross_entropy(out, y) - 0.05 * torch.distributions.Categorical(logits=out).entropy().mean()",
        "torch.stack([F.cross_entropy(o[None], t[None]) for o, t in zip(out, y)]).mean()",
        "(F.cross_entropy(out, y, reduction='none') * (y > 0)).sum() / (y > 0).sum().clamp(min=1)",
        "F.cross_entropy(out[y != 1], y[y != 1])",
    ],
    "sequences": [
        "F.cross_entropy(out.reshape(-1, CLASSES), y.reshape(-1), ignore_index=-100)",
        "F.cross_entropy(out.transpose(1, 2), y, ignore_index=-100)",
        """
nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")(out.reshape(-1, CLASSES), y.reshape(-1)) / (
    y != -100
).sum()
""",
        """
(
    F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none", ignore_index=-100)
    .view_as(y)
    .sum(1)
    / (y != -100).sum(1)
).mean()
""",
        "sum(F.cross_entropy(out[:, t], y[:, t].clamp(min=0)) for t in range(y.size(1))) / y.size(1)",
    ],
    "numbers": [
        "F.mse_loss(out, y)",
        "F.mse_loss(out, y, reduction='sum')",
        "F.smooth_l1_loss(out, y)",
        "F.huber_loss(out, y, delta=0.5)",
        "(out - y).pow(2).sum(1).mean()",
        "(out - y).abs().mean(0).sum()",
        """
F.gaussian_nll_loss(out[:, :1], y[:, :1], F.softplus(out[:, 1:2]) + 1e-3) + F.l1_loss(
    out[:, 2], y[:, 2]
)
""",
        "torch.log(torch.cosh(out - y)).mean()",
        "0.5 * F.mse_loss(out[:, 0], y[:, 0]) + 0.5 * F.l1_loss(out[:, 1:], y[:, 1:], reduction='sum')",
        "(torch.linspace(1, 2, 3, device=device) * (out - y) ** 2).sum() / out.numel()",
        "sum(F.mse_loss(out[:, i], y[:, i]) * w for i, w in enumerate((1, 2, 3)))",
    ],
}

OPTIMIZERS = [
    "optim.SGD(model.parameters(), lr=0.05)",
    "optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)",
    "optim.Adam(model.parameters(), lr=3e-3)",
    "optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, amsgrad=True)",
    "optim.RMSprop(model.parameters(), lr=1e-3, centered=True)",
    "optim.Adagrad(model.parameters(), lr=1e-2)",
    "optim.Adadelta(model.parameters())",
    "optim.NAdam(model.parameters(), lr=2e-3)",
    "optim.RAdam(model.parameters(), lr=2e-3, foreach=False)",
    "optim.Adamax(model.parameters(), lr=2e-3)",
    "optim.ASGD(model.parameters(), lr=1e-2)",
    """
optim.AdamW(
    [
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.dim() <= 1], weight_decay=0.0),
    ],
    lr=3e-3,
)
""",
    """
optim.SGD(
    [dict(params=p, lr=0.01 * (1 + i % 3)) for i, p in enumerate(model.parameters())],
    lr=0.1,
    momentum=0.5,
)
""",
    "optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=3e-3, betas=(0.5, 0.9))",
    "optim.Rprop(model.parameters(), lr=1e-3)",
    "optim.Adafactor(model.parameters(), lr=1e-2)",
]

SCHEDULES = [
    "",
    "",
    "schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)",
    "schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 4))",
    """
schedule = optim.lr_scheduler.OneCycleLR(
    optimizer, 0.01, total_steps=STEPS + 1, cycle_momentum=False
)
""",
    """
schedule = optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 2),
        optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ],
    [2],
)
""",
]
